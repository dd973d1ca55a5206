"""Readers of prompt files (one prompt per line) and of datasets with image or video files as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, named_rows, read_each, read_prompts, text_lines
from mmrl.data.fields import RowError, text, uid_of
from mmrl.data.media import locate
from mmrl.data.row_fields import Column
from mmrl.data.separated import SEPARATED

T = TypeVar("T")
Scores = tuple[Mapping[str, float], ...]
CAPTION = ("prompt", "caption")


def objects(path: Path, read: Callable[[Mapping[str, Any]], T]) -> list[T]:
    """Convert every row of a JSON lines, CSV or TSV file with `read`; one error names all bad rows."""
    return read_each(path, named_rows(path), lambda row, _: read(row.columns))


def holds_objects(path: Path) -> bool:
    """Whether a file has named columns (JSON lines, CSV, TSV); other files have one text per line."""
    return path.suffix in (".jsonl", ".json", *SEPARATED)


def captions(path: Path) -> list[str]:
    """Read the texts of a file of prompts: one per line, or the `prompt` (or `caption`) of every row."""
    if holds_objects(path):
        return objects(path, lambda row: text_of(row, CAPTION))
    return [row.columns["line"].strip() for row in text_lines(path)]


def text_of(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Read the text of the first column of `names` that a row has."""
    for name in names:
        if name in row:
            return text(row[name], name).strip()
    raise RowError(f"wanted a key {' or '.join(map(repr, names))}")


def line_uid(row: DataRow, path: Path) -> str:
    """Return the id of a row: its column `id`, or else the name of the file and the line number."""
    return uid_of(row.columns, f"{path.stem}#{row.place.rpartition(':')[2]}")  # `place` is file:line


@dataclass(frozen=True)
class RecordedAnswers(Sequence):
    """Images or videos of one prompt, listed in a dataset with their scores; decoded on every access."""

    files: tuple[Any, ...]  # paths, or encoded bytes from a column of the row (`Media.source`)
    scores: Scores  # scores of each file, by the name of the reward
    load: Callable[[Any], Outcome]
    size: Callable[[Any], tuple[int, ...]]  # frames, height and width of a file, without decoding

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> Outcome:
        return replace(self.load(self.files[at]), recorded=self.scores[at])

    def sizes(self) -> list[tuple[int, ...]]:
        """Read the number of frames, height and width of every recorded answer."""
        return [self.size(file) for file in self.files]


def recorded_prompts(
    path: Path,
    root: Path,
    limit: int,
    read: Callable[[Mapping[str, Any]], tuple[list[str], Scores]],
    load: Callable[[Path], Outcome],
    size: Callable[[Path], tuple[int, ...]],
    bad_rows: str,
    reads: Sequence[Column],
) -> Sequence[Prompt]:
    """Read rows with a `prompt` or `caption`, and image or video files as recorded answers.

    One error names all bad rows, missing files included.

    Args:
        path: File of rows.
        root: Folder of the recorded files.
        limit: Largest number of rows; 0: all.
        read: Returns the file names of a row and the scores of each file.
        load: Decodes a file.
        size: Reads frames, height and width of a file.
        bad_rows: "error", or "drop" to skip bad rows.
        reads: The columns that `read` reads.
    """

    def make(row: DataRow, number: int) -> Prompt:
        names, scores = read(row.columns)
        answers = RecordedAnswers(tuple(locate(name, root) for name in names), scores, load, size)
        message = Message("user", (Part(text_of(row.columns, CAPTION)),))
        return Prompt(line_uid(row, path), (message,), row.columns.get("target"), answers, row.all)

    columns = (CAPTION, "target", *reads)
    return read_prompts(path, named_rows(path), make, reads=columns, bad_rows=bad_rows, limit=limit)
