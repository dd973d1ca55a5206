"""Strict reading of what one field of a row holds: a text, a number, a list, an id. All else is a `RowError`
that names the field and what came."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 3


class RowError(ValueError):
    """A row, or a file of rows, that cannot be used. The message names the place."""


def short(value: Any) -> str:
    """Show a value in an error, cut where it is long or deeply nested."""
    return _SHORT.repr(value)


def text(value: Any, name: str) -> str:
    """Let a text through that holds more than blanks."""
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"wanted a text as `{name}`, got {short(value)}")
    return value


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number that a float can hold; True and False are not."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def number(value: Any, name: str) -> float:
    """Let a finite number through, as a float."""
    if not is_number(value):
        raise RowError(f"wanted a finite number as `{name}`, got {short(value)}")
    return float(value)


def listed(value: Any, name: str, size: int | None = None) -> list[Any]:
    """Let a list through, of `size` entries if one is given."""
    if not isinstance(value, list | tuple) or size not in (None, len(value)):
        wanted = "a list" if size is None else f"a list of {size}"
        raise RowError(f"wanted {wanted} as `{name}`, got {short(value)}")
    return list(value)


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Let an object with named fields through."""
    if not isinstance(value, Mapping):
        raise RowError(f"wanted an object as `{name}`, got {short(value)}")
    return value


def plain(value: Any, name: str) -> Any:
    """Let through what JSON can hold."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RowError(f"cannot write `{name}`, {short(value)}: {error}") from error
    return value


def uid_of(columns: Mapping[str, Any], default: str, name: str = "id") -> str:
    """Read the id of a row, a text or a number; without one it is the `default`."""
    value = columns.get(name)
    if value is None:
        return default
    return str(value) if is_number(value) else text(value, name)


def fill_template(template: str, words: Mapping[str, Any]) -> str:
    """Put the fields of a row into a template of `str.format`."""
    try:
        return template.format_map(words)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        reason = f"names {error}, which the row does not have"
        if not isinstance(error, LookupError):
            reason = f"does not fit the row: {error}"
        raise RowError(f"the prompt {template!r} {reason}") from error
