"""Text files of a data set, line by line, and files inside one declared folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmrl.media import locate
from mmrl.rows import RowError
from mmrl.types import Message, Outcome, Part, Prompt

Recorded = tuple[
    list[str], Callable[[tuple[Path, ...]], Sequence[Outcome]]
]  # names of files, answers of them


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a UTF-8 file that hold something, numbered from 1."""
    if not path.is_file():
        raise RowError(f"there is no file '{path}'")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise RowError(f"{path}:{number}: not UTF-8: {error}") from error
    # Not `splitlines`, which also cuts at separators that may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read one JSON object a line, each with its place in words."""
    for number, line in lines(path):
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RowError(f"{place}: not a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise RowError(f"{place}: not a JSON object, but {line[:80]!r}")
        yield place, row


def text_of(row: dict[str, Any], names: tuple[str, ...], place: str) -> str:
    """Find the first of some keys that a row has, and the text behind it."""
    for name in names:
        if name in row:
            if not isinstance(row[name], str) or not row[name].strip():
                raise RowError(f"{place}: '{name}' must be a text that is not empty, not {row[name]!r}")
            return row[name].strip()
    raise RowError(f"{place}: wanted a key {' or '.join(map(repr, names))}, got {sorted(row)}")


def recorded_prompts(
    path: Path, root: Path, limit: int, what: str, read: Callable[[dict[str, Any], str], Recorded]
) -> list[Prompt]:
    """Read one prompt a line (`prompt` or `caption`) with recorded files under `root`; 0: no `limit`.

    `read` gives, of a row and its place, the names of its files and what makes answers of the files found.
    Every file that cannot be used is named, all of them at once.
    """
    uids, found, missing = Uids(path), [], []
    for place, row in objects(path):
        names, answers = read(row, place)
        files = []
        for name in names:
            try:
                files.append(locate(name, root))
            except RowError as error:
                missing.append(f"{place}: {error}")
        message = Message("user", (Part(text_of(row, ("prompt", "caption"), place)),))
        uid = uids.of(row, place)
        found.append(Prompt(uid, (message,), row.get("target"), answers(tuple(files)), row))
        if len(found) == limit:
            break
    if missing:
        shown = "\n  ".join(missing[:10])
        raise RowError(f"{len(missing)} {what} of '{path}' cannot be used:\n  {shown}")
    if not found:
        raise RowError(f"the file '{path}' holds no row")
    return found


class Uids:
    """The ids of a file's rows. Two rows of one id would be compared as one group, and are refused."""

    def __init__(self, path: Path) -> None:
        self.stem, self.places = path.stem, {}

    def of(self, row: dict[str, Any], place: str) -> str:
        """Give the row's own `id`, or else the file's name and the number of the line."""
        uid = str(row.get("id", f"{self.stem}#{place.rpartition(':')[2]}"))
        if uid in self.places:
            raise RowError(f"{place}: the id '{uid}' is that of {self.places[uid]}")
        self.places[uid] = place
        return uid
