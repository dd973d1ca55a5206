"""Prompts to make pictures or clips of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mmrl.diffusion.rows import Uids, lines, objects, text_of
from mmrl.registry import data
from mmrl.rows import RowError
from mmrl.types import Message, Part, Prompt


@data
def prompts(*, path: str, format: Literal["", "txt", "jsonl"] = "", limit: int = 0) -> list[Prompt]:
    """Read prompts: one a line (txt), or one JSON object a line with `prompt` and whatever rewards read of
    it.

    Without `format`, files that end in `.jsonl` or `.json` hold objects. An object's other keys, and those of
    its `metadata`, become the prompt's columns; `target` is what rewards compare with, `id` names the prompt.
    Without an `id` a prompt is named after its file and line, so it has one name however much is read.
    """
    source = Path(path)
    uids = Uids(source)
    read = _objects(source) if (format or source.suffix.lstrip(".")) in ("jsonl", "json") else _plain(source)
    found = []
    for place, text, columns in read:
        message = Message("user", (Part(text),))
        found.append(Prompt(uids.of(columns, place), (message,), columns.get("target"), columns=columns))
        if len(found) == limit:
            break
    if not found:
        raise RowError(f"the file '{source}' holds no prompt")
    return found


def _plain(source: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for number, line in lines(source):
        yield f"{source}:{number}", line.strip(), {}


def _objects(source: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for place, row in objects(source):
        metadata = row.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise RowError(f"{place}: 'metadata' must be an object, not {metadata!r}")
        yield place, text_of(row, ("prompt", "caption"), place), {**metadata, **row}
