"""The keys of a configuration: dotted names, types, defaults, and the comments beside them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmrl.config import schema
from mmrl.config.ranges import marks
from mmrl.config.schema import Kind, Piece, hints_of

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class Key:
    """A configuration key: dotted name, type annotation, default (or `REQUIRED`) and comment."""

    place: str
    wanted: Any
    default: Any
    comment: str

    @property
    def kind(self) -> Kind | None:
        """The kind of the pieces that the key holds; None if it holds no pieces."""
        return next(iter(marks(self.wanted, Kind)), None)

    @property
    def name(self) -> str:
        """The last component of the key's dotted name."""
        return self.place.rpartition(".")[2]


def keys_of(kind: type, place: str = "") -> Iterator[Key]:
    """Iterate over the keys of a configuration dataclass, including those of its sections, in order."""
    hints, comments = hints_of(kind), comments_of(kind)
    for field in dataclasses.fields(kind):
        wanted = hints[field.name]
        if dataclasses.is_dataclass(wanted) and wanted is not Piece:
            yield from keys_of(typing.cast(type, wanted), f"{place}{field.name}.")
            continue
        factory = field.default_factory
        default = field.default if factory is REQUIRED else factory()
        yield Key(place + field.name, wanted, default, comments[field.name])


@cache
def comments_of(kind: type) -> Mapping[str, str]:
    """Read the comment of every field: the comment at the end of its line, or else the lines above it."""
    lines = inspect.getsource(schema).splitlines()
    nodes = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)]
    (node,) = [node for node in nodes if node.name == kind.__name__]
    comments = {}
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), lineno=first, end_lineno=int(last)):
                above = first - 2  # list index of the line above the field
                while lines[above].lstrip().startswith("#"):
                    above -= 1
                written = [line.strip().removeprefix("# ") for line in lines[above + 1 : first - 1]]
                comments[name] = lines[last - 1].partition("  # ")[2] or " ".join(written)
    return comments
