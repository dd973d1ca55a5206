"""Prompts to make pictures or clips of."""

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
    """Read prompts: one a line (txt), or one JSON object a line with `prompt` and whatever rewards read of
    it.

    Without `format`, files that end in `.jsonl` or `.json` hold objects. An object's other keys, and those of
    its `metadata`, become the prompt's columns; `target` is what rewards compare with, `id` names the prompt.
    Without an `id` a prompt is named after its file and line, so it has one name however much is read.
    """
    source = Path(path)
    if (format or source.suffix.lstrip(".")) in ("jsonl", "json"):
        return read_prompts(source, json_lines(source), lambda row, number: _object(row, source), limit=limit)
    return read_prompts(source, text_lines(source), lambda row, number: _plain(row, source), limit=limit)


def _plain(row: DataRow, source: Path) -> Prompt:
    message = Message("user", (Part(row.columns["line"].strip()),))
    return Prompt(line_uid(DataRow(row.place, ""), source), (message,))


def _object(row: DataRow, source: Path) -> Prompt:
    given = row.columns.get("metadata")
    columns = {**({} if given is None else mapping(given, "metadata")), **row.columns}
    message = Message("user", (Part(text_of(row.columns, CAPTION)),))
    return Prompt(line_uid(row, source), (message,), columns.get("target"), columns=columns)
