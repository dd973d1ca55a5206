"""Data sets of text prompts for image and video models."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Message, Part, Prompt
from mmrl.data.dataset_io import DataRow, json_lines, read_prompts, text_lines
from mmrl.data.fields import mapping
from mmrl.data.text_files import CAPTION, line_uid, text_of


@data
def prompts(
    *, path: str, format: Literal["", "txt", "jsonl"] = "", limit: NonNegativeInt = 0
) -> list[Prompt]:
    """Text prompts for image and video models, from a text file or JSON lines.

    A JSON object has a `prompt` (or `caption`). Its other keys, and those of its `metadata`, become the
    prompt's columns; `target` is what rewards compare with, `id` names the prompt. Without an `id` its name
    is that of the file and the line, whatever the `limit`.

    Args:
        path: The file.
        format: `txt` (one prompt a line) or `jsonl` (one object a line); by default from the file's suffix.
        limit: Most prompts to read; 0 is all.
    """
    source = Path(path)

    def plain(row: DataRow, number: int) -> Prompt:
        message = Message("user", (Part(row.columns["line"].strip()),))
        return Prompt(line_uid(DataRow(row.place, ""), source), (message,))

    def from_object(row: DataRow, number: int) -> Prompt:
        metadata = row.columns.get("metadata")
        columns = {**({} if metadata is None else mapping(metadata, "metadata")), **row.columns}
        message = Message("user", (Part(text_of(row.columns, CAPTION)),))
        return Prompt(line_uid(row, source), (message,), columns.get("target"), columns=columns)

    if (format or source.suffix.lstrip(".")) in ("jsonl", "json"):
        return read_prompts(source, json_lines(source), from_object, limit=limit)
    return read_prompts(source, text_lines(source), plain, limit=limit)
