"""Descriptions of types, defaults and options for `mmrl keys` and `mmrl list`."""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from functools import reduce
from typing import Annotated, Any, Literal

import yaml

from mmrl.config import schema
from mmrl.config.binding import FILLED
from mmrl.config.keys import REQUIRED, keys_of
from mmrl.config.ranges import bounds_of, is_number, marks
from mmrl.config.registry import HOMES, Entry
from mmrl.config.schema import FORMS, Kind, Piece, Scheduled, as_plain


def describe_type(wanted: Any) -> str:
    """Describe a type annotation with its range in words, such as `whole number, at least 1`."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        if kinds := marks(wanted, Kind):
            words = describe_type(inner[0])
            return words.replace("piece", f"{kinds[0].name} piece{'s' * (words != 'piece')}")
        if scheduled := marks(wanted, Scheduled):
            return f"{describe_type(scheduled[0].wanted)}, or a schedule"
        bounds = map(str, bounds_of(wanted))
        return ", ".join([describe_type(inner[0]), *bounds])
    if origin is Literal:
        return " or ".join(str(member) for member in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(member) for member in inner if member is not type(None))
    if schema.empty_of(wanted) is list:
        return f"list of {describe_type(inner[0])}" if inner else "list"
    if schema.empty_of(wanted) is dict:
        return f"mapping of {describe_type(inner[1])}" if inner else "mapping"
    if wanted is Piece:
        return "piece"
    return FORMS.get(wanted, "anything").removeprefix("a ")


def describe_default(default: Any) -> str:
    """Format a default value in YAML syntax."""
    if default in (REQUIRED, inspect.Parameter.empty):
        return "required"
    plain = as_plain(default)
    if plain in (None, ""):
        return "none" if plain is None else "empty"
    return json.dumps(plain).replace('"', "")


# ---- options of pieces


def split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and a dictionary that maps each option in `Args:` to its meaning."""
    words, _, block = docstring.partition("\nArgs:\n")
    meanings: dict[str, str] = {}
    lines = block.splitlines()
    # The `Args:` block ends at the first line without indentation, such as `Raises:`.
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    name = ""
    for line in lines[:end]:
        entry = re.match(r"    (\w+)(?: \([^)]*\))?: (.*)", line)
        if entry:
            name = entry[1]
            meanings[name] = entry[2]
        elif name and line.strip():
            meanings[name] += " " + line.strip()
    return "\n".join([words, *lines[end:]]).rstrip(), meanings


def describe_option(entry: Entry, name: str) -> str:
    """Describe the type of an option; an option named after a kind (`engine`) takes a piece of this kind."""
    wanted = entry.hints.get(name, Any)
    if name in HOMES and not is_number(wanted):
        return f"list of {name} pieces" if schema.empty_of(wanted) is list else f"{name} piece"
    return describe_type(wanted)


def yaml_of(entry: Entry) -> str:
    """Return example YAML with all options of a piece; a required value is the option's name in capitals."""
    options = {name: p.default for name, p in entry.options.items() if name not in (*FILLED, "name")}
    required = inspect.Parameter.empty
    given = {k: k.upper() if v is required else as_plain(v) for k, v in options.items() if v is not None}
    piece = {"name": entry.full_name, **given} if given else entry.full_name
    place, value = entry.kind, piece  # for a piece without a key of its own, such as a `surrogate`
    for key in keys_of(schema.Config):
        if key.kind and (key.kind.name, key.kind.on) == (entry.kind, entry.on):
            empty = schema.empty_of(key.wanted)
            place, value = key.place, [piece] if empty is list else {"ref": piece} if empty is dict else piece
            break
    nested = reduce(lambda inner, part: {part: inner}, reversed(place.split(".")), value)
    return yaml.safe_dump(nested, default_flow_style=True, sort_keys=False, width=sys.maxsize).strip()[1:-1]
