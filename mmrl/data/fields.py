"""Validation of single fields of a row: text, number, list, object, id.

A value of another type raises a `RowError` with the field and the value."""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Mapping
from string import Formatter
from typing import Any

WRITTEN = re.compile(r"\s*[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?\s*", re.ASCII)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 3


class RowError(ValueError):
    """Error for a row, or a file of rows, that cannot be used. The message names the place of the row."""


def short(value: Any) -> str:
    """Format a value for an error message; long and deeply nested values are shortened."""
    return _SHORT.repr(value)


def text(value: Any, name: str) -> str:
    """Return `value` if it is a non-blank text; otherwise raise `RowError` with the field `name`."""
    if isinstance(value, str) and value.strip():
        return value
    raise RowError(f"wanted a text as `{name}`, got {short(value)}")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that fits a float; True and False are not numbers."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # NaN compares as False


def number(value: Any, name: str) -> float:
    """Convert a finite number, or a text with a number (as in CSV cells), to a float."""
    if type(value) is str and WRITTEN.fullmatch(value):
        value = float(value)
    if not is_number(value):
        raise RowError(f"wanted a finite number as `{name}`, got {short(value)}")
    return float(value)


def listed(value: Any, name: str, size: int | None = None) -> list[Any]:
    """Convert a list, or a JSON text (as in CSV cells), to a list; `size` is the wanted length, if any."""
    entries = unpacked(value)
    if isinstance(entries, list | tuple) and size in (None, len(entries)):
        return list(entries)
    wanted = "a list" if size is None else f"a list of {size}"
    raise RowError(f"wanted {wanted} as `{name}`, got {short(value)}")


def unpacked(value: Any) -> Any:
    """Parse a text with a JSON list (as in CSV cells); return other values unchanged."""
    if type(value) is str and value.lstrip().startswith("["):
        try:
            entries = parse_json(value)
        except RowError:
            return value
        return entries if type(entries) is list else value
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return `value` if it is a mapping; otherwise raise `RowError` with the field `name`."""
    if isinstance(value, Mapping):
        return value
    raise RowError(f"wanted an object as `{name}`, got {short(value)}")


def plain(value: Any, name: str) -> Any:
    """Return a value in JSON types; raises `RowError` with the field `name` if JSON cannot represent it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RowError(f"cannot write `{name}`, {short(value)}: {error}") from error
    return value


def parse_json(text: str) -> Any:
    """Parse JSON; raises `RowError` also for duplicate keys, huge numbers and too deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):  # a dict keeps only the last of equal keys
            name = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the key {short(name)} occurs twice")
        return entries

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise RowError(str(error)) from error


def with_columns(reason: str, columns: Mapping[str, Any]) -> str:
    """Append the names of a row's columns to the error text about a missing column."""
    named = re.findall(r"[`']([^\W\d]\w*)[`']", reason)
    if not columns or all(name in columns for name in named):
        return reason
    return f"{reason} (the row has {', '.join(map(str, columns))})"


def uid_of(columns: Mapping[str, Any], default: str, name: str = "id") -> str:
    """Return the id in the column `name` as a text, or `default` without one."""
    value = columns.get(name)
    if value is None:
        return default
    return str(value) if is_number(value) else text(value, name)


def template_fields(*templates: str) -> tuple[str, ...]:
    """List the fields in `str.format` templates; empty if a template cannot be parsed."""
    try:
        named = [name for template in templates for _, name, _, _ in Formatter().parse(template) if name]
    except ValueError:  # `fill_template` reports it
        return ()
    return tuple(re.split(r"[.\[]", name)[0] for name in named)


def fill_template(template: str, words: Mapping[str, Any]) -> str:
    """Fill a `str.format` template with the fields of a row."""
    try:
        return template.format_map(words)
    except LookupError as error:
        raise RowError(f"the prompt {template!r} names {error}, which the row does not have") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RowError(f"the prompt {template!r} does not fit the row: {error}") from error
