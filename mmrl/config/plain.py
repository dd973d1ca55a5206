"""Plain values of a configuration, as YAML has them: pieces as mappings, dotted keys, lists, numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

from mmrl.config.loading import ConfigError, merge
from mmrl.config.ranges import LARGEST

ABSENT = object()  # stands for no value where None is one


def as_mapping(piece: str | Mapping[str, Any]) -> dict[str, Any]:
    """Write a piece as a mapping: `clip` is `{name: clip}`."""
    match piece:
        case str():
            return {"name": piece}
    return dict(piece)


def as_list(value: Any) -> list[Any]:
    """Return the members of a list or tuple, a list with any other value, or an empty one for None."""
    match value:
        case None:
            return []
        case list() | tuple():
            return list(value)
    return [value]


def lookup(raw: Any, key: str, default: Any = None) -> Any:
    """Look a dotted key up in plain values; items of a list go by their numbers: `rewards.0.name`."""
    for part in key.split("."):
        match raw:
            case str():
                raw = as_mapping(raw)
            case list():
                raw = dict(enumerate(raw))
            case Mapping():
                pass
            case _:
                return default
        # In a mapping that changes a list, the numbers may be texts or whole numbers.
        names = [part, int(part)] if part.isdigit() else [part]
        raw = next((raw[name] for name in names if name in raw), ABSENT)
    return default if raw is ABSENT else raw


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nest values by their dotted keys; the numbers of items stay keys, with which `merge` changes a list."""
    parts = ((reversed(key.split(".")), value) for key, value in changes.items())
    return reduce(merge, (reduce(lambda inner, part: {part: inner}, *both) for both in parts), {})


def check_finite(value: Any, place: str) -> None:
    """Raise at NaN, infinities and whole numbers beyond 64 bits, at any depth."""
    match value:
        case float() if not math.isfinite(value):
            raise ConfigError(f"'{place}' must be a finite number, not {value!r}")
        case int() if abs(value) > LARGEST:
            bits = value.bit_length()
            raise ConfigError(f"'{place}' must be a number of at most 63 bits, not one of {bits}")
        case Mapping():
            for key, inner in value.items():
                check_finite(inner, f"{place}.{key}")
        case [*items]:
            for i, inner in enumerate(items):
                check_finite(inner, f"{place}[{i}]")
