"""Rows with prompts, and with recorded files inside one declared folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, SourceError, bad_rows_error, json_lines, read_prompts
from mmrl.data.fields import RowError, short, text, uid_of
from mmrl.data.media import locate

T = TypeVar("T")
CAPTION = ("prompt", "caption")
Recorded = tuple[
    list[str], Callable[[tuple[Path, ...]], Sequence[Outcome]]
]  # names of files, answers of them


def objects(path: Path, read: Callable[[Mapping[str, Any]], T]) -> list[T]:
    """Read one JSON object a line, all of which must be usable; `read` makes something of each."""
    made, bad = [], []
    for row in json_lines(path):
        try:
            if row.fault:
                raise RowError(row.fault)
            made.append(read(row.columns))
        except RowError as error:
            bad.append(f"{row.place}: {error}")
    if bad:
        raise bad_rows_error(path, bad)
    if not made:
        raise SourceError(f"'{path}' holds no row")
    return made


def text_of(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Find the first of some keys that a row has, and the text under it."""
    for name in names:
        if name in row:
            return text(row[name], name).strip()
    raise RowError(f"wanted a key {' or '.join(map(repr, names))}, got {short(sorted(row))}")


def line_uid(row: DataRow, path: Path) -> str:
    """Give the row's own `id`, or else the file's name and the number of the line."""
    return uid_of(row.columns, f"{path.stem}#{row.place.rpartition(':')[2]}")


def recorded_prompts(
    path: Path, root: Path, limit: int, read: Callable[[Mapping[str, Any]], Recorded]
) -> list[Prompt]:
    """Read one prompt a line (`prompt` or `caption`) with recorded files under `root`; 0: no `limit`.

    `read` gives, of a row, the names of its files and what makes answers of the files found. Every row that
    cannot be used is named, all of them at once.
    """

    def make(row: DataRow, number: int) -> Prompt:
        names, answers = read(row.columns)
        files = tuple(locate(name, root) for name in names)
        message = Message("user", (Part(text_of(row.columns, CAPTION)),))
        return Prompt(line_uid(row, path), (message,), row.columns.get("target"), answers(files), row.columns)

    return read_prompts(path, json_lines(path), make, limit=limit)
