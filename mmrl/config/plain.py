"""Functions for the plain values of a YAML file: pieces as mappings, dotted keys, lists, numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from functools import reduce
from pathlib import PurePath
from typing import Any

import yaml

from mmrl.config.loading import ConfigError, merge
from mmrl.config.ranges import LARGEST

ABSENT = object()  # marks a missing value, because None is a value


def as_mapping(piece: str | Mapping[str, Any]) -> dict[str, Any]:
    """Convert a piece to a mapping: `clip` becomes `{name: clip}`."""
    match piece:
        case str():
            return {"name": piece}
    return dict(piece)


def as_list(value: Any) -> list[Any]:
    """Convert a value to a list: the items of a list or tuple, [] for None, [value] for any other value."""
    match value:
        case None:
            return []
        case list() | tuple():
            return list(value)
    return [value]


def lookup(raw: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key; list items are addressed by index: `rewards.0.name`."""
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
        # A mapping that changes items of a list has their indices as keys, as texts or integers.
        names = [part, int(part)] if part.isdigit() else [part]
        raw = next((raw[name] for name in names if name in raw), ABSENT)
    return default if raw is ABSENT else raw


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert {dotted key: value} to nested mappings, which `merge` can apply; list indices stay keys."""
    parts = ((reversed(key.split(".")), value) for key, value in changes.items())
    return reduce(merge, (reduce(lambda inner, part: {part: inner}, *both) for both in parts), {})


def check_finite(value: Any, place: str) -> None:
    """Raise `ConfigError` for NaN, infinities and integers beyond 64 bits, at any depth of a value."""
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


class _Dumper(yaml.SafeDumper):
    """Writer of YAML that quotes what PyYAML alone leaves: 1e5, OmegaConf's number, and U+0085, a break."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        try:
            float(data)
            style = "'"
        except ValueError:
            style = '"' if "\x85" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(set, _Dumper.represent_undefined)  # an error: the reader takes no sets
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))
_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def to_yaml(value: Any) -> str:
    """Return plain values as YAML text, which `mmrl.config.loading.read` reads as equal ones.

    Paths are written as texts, members of enums as their values. Raises `yaml.YAMLError` for other objects.
    """
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
