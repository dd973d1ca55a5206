"""Resolution of a configuration: adds the default of every option of every piece."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from mmrl.config.binding import FILLED, left_out
from mmrl.config.loading import ConfigError
from mmrl.config.plain import lookup
from mmrl.config.ranges import is_number
from mmrl.config.registry import HOMES, Entry, find
from mmrl.config.schema import Kind, Piece, Scheduled, as_piece, as_plain, each, held_fields

Named = dict[str, tuple[str, Entry]]  # maps a piece's configuration key to its name and registry entry


def resolve_defaults(config: Any) -> tuple[dict[str, Any], Named]:
    """Fill a configuration's defaults; return it as plain values, and its pieces by configuration key.

    Raises `ConfigError` for a piece that does not exist.
    """
    plain, entries = as_plain(config), Named()
    for mark, value, name in held_fields(config):
        match mark, value:
            case Scheduled(wanted=wanted), _:
                filled = _option("", value, wanted, name, entries)
            case Kind(name=kind), Piece():
                filled = _piece(kind, value, name, entries)
            case Kind(name=kind), Mapping():
                filled = {key: _piece(kind, value[key], f"{name}.{key}", entries) for key in value}
            case _:
                filled = [_piece(mark.name, piece, place, entries) for piece, place in each(value, name)]
        above, _, key = name.rpartition(".")
        (lookup(plain, above) if above else plain)[key] = filled
    return plain, entries


def _piece(kind: str, piece: Piece, place: str, entries: Named) -> dict[str, Any]:
    """Return a piece as a dict with all its options, and all options of the pieces inside it."""
    try:
        entry = find(kind, piece.name)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    entries[place] = (piece.name, entry)
    options = dict(piece.options)
    for name, parameter in entry.options.items():
        missing = parameter.default is inspect.Parameter.empty or name in FILLED
        if not missing and (name not in options or left_out(entry, name, options[name])):
            options[name] = parameter.default
    hints = entry.hints
    return {"name": piece.name} | {
        name: _option(name, value, hints.get(name, Any), f"{place}.{name}", entries)
        for name, value in options.items()
    }


def _option(name: str, value: Any, wanted: Any, place: str, entries: Named) -> Any:
    """Return the plain value of an option; an option named after a kind (`engine`) contains pieces."""
    match value:
        case list() | tuple() if name in HOMES:
            return [_piece(name, *one, entries) for one in each([as_piece(v, place) for v in value], place)]
        case str() | {"name": _} | Piece() if value and name in HOMES:  # "" means no piece
            return _piece(name, as_piece(value, place), place, entries)
        case {"name": _} if is_number(wanted) or not name:
            return _piece("schedule", as_piece(value, place), place, entries)
    return json.loads(json.dumps(as_plain(value), default=lambda one: f"a {type(one).__name__}"))
