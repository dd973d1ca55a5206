"""Data set of preference pairs about images: a chosen and a rejected answer to each prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, Rows, parquet_of, read_prompts, row_files, row_of, split_of
from mmrl.data.fields import RowError, listed, mapping, number, short, text, uid_of
from mmrl.vision.datasets.visual_qa import medium_of
from mmrl.vision.media.media_root import MediaRef, MediaRoot, decode_image, media_refs
from mmrl.vision.media.prompts import interleaved
from mmrl.vision.media.video import FrameSampling

log = logging.getLogger("mmrl")
ROLES = ("system", "user", "assistant")
SIDES = ("chosen", "rejected")
READ = ("image", "images", "prompt", "conversations", *SIDES, "chosen_answer", "rejected_answer")


@data
def preference_pairs(
    *,
    path: str,
    root: str = "",
    min_gap: NonNegativeFloat = 0.0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> list[Prompt]:
    """Read preference pairs in TRL's columns: `prompt`, `chosen`, `rejected`, and `images` or `image`.

    Texts may be messages. Images are paths or encoded; those inside parquet are decoded when they are used.
    The answers, the chosen one first, record `preferred`, 1 and 0, and `score`: `score_chosen` and
    `score_rejected` of the row, or `preferred` without them.

    Args:
        path: jsonl, JSON, parquet, or a folder of these.
        root: Folder of the images; by default that of the rows.
        min_gap: Least difference of the two scores; other pairs are skipped.
        bad_rows: Rows that cannot be used raise (`error`) or are skipped and logged (`drop`).
        limit: Most pairs to read; 0 for all.
    """
    source = Path(path)
    media = MediaRoot(Path(root) if root else source if source.is_dir() else source.parent)
    close = 0

    def make(row: DataRow, number: int) -> Prompt | None:
        nonlocal close
        prompt = _prompt(row, number, media)
        better, worse = (answer.recorded["score"] for answer in prompt.answers)
        if abs(better - worse) >= min_gap:
            return prompt
        close += 1
        return None

    prompts = read_prompts(source, _rows(source), make, bad_rows=bad_rows, limit=limit)
    if close:
        log.warning("left out %d pairs of '%s' that are less than %g apart", close, source, min_gap)
    return prompts


def _prompt(row: DataRow, number: int, root: MediaRoot) -> Prompt:
    columns = row.columns
    media: list[Media] = []
    for name in ("image", "images"):
        value = columns.get(name)
        images = value if isinstance(value, LazyImages) else media_refs(value, "image", name)
        media += [
            image if isinstance(image, Media) else medium_of(image, row.place, root, FrameSampling())
            for image in images
        ]
    kept = {key: value for key, value in columns.items() if key not in READ}
    answers = tuple(_answer(columns, side) for side in SIDES)
    messages = _messages(columns.get("prompt"), media)
    return Prompt(uid_of(columns, f"{row.split}#{number}"), messages, None, answers, kept)


def _answer(columns: Mapping[str, Any], side: str) -> Outcome:
    answer = text(_text_of(columns.get(side), side), side)
    preferred, score = float(side == "chosen"), columns.get(f"score_{side}")
    score = preferred if score is None else number(score, f"score_{side}")
    return Outcome(text=answer, recorded={"preferred": preferred, "score": score})


def _messages(prompt: Any, media: list[Media]) -> tuple[Message, ...]:
    """Read a prompt, a text or messages; the media belong to the user's first turn."""
    turns = [{"role": "user", "content": prompt}] if type(prompt) is str else listed(prompt, "prompt")
    messages, left = [], media
    for i, turn in enumerate(turns):
        name = f"prompt[{i}]"
        role = mapping(turn, name).get("role") or "user"
        if role not in ROLES:
            raise RowError(f"wanted {', '.join(ROLES)} as the role of `{name}`, got {short(role)}")
        words = _text_of(turn, name)
        shown, left = (left, []) if role == "user" else ([], left)
        messages.append(Message(role, interleaved(words, shown) if shown else (Part(words),)))
    if not messages or left or not any(part.text.strip() for message in messages for part in message.parts):
        raise RowError(f"wanted a `prompt` with a turn of the user, got {short(prompt)}")
    return tuple(messages)


def _text_of(value: Any, name: str) -> str:
    """Read a text, a message, or the last of several; images among its parts become marks."""
    match value:
        case str():
            return value
        case {"content": content}:
            return _text_of(content, f"{name}.content")
        case [*parts] if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
            return "".join(_part_text(part, name) for part in parts)
        case [*_, last]:
            return _text_of(last, name)
    raise RowError(f"wanted a text, a message or messages as `{name}`, got {short(value)}")


def _part_text(part: Mapping[str, Any], name: str) -> str:
    match part:
        case {"type": "image", **rest} if all(value is None for value in rest.values()):
            return "<image>"
        case {"type": "text", "text": str(words)}:
            return words
    raise RowError(f"wanted a text or the mark of an image as a part of `{name}`, got {short(part)}")


# ---- images inside parquet


class LazyImages(tuple):
    """Images of a field; those stored inside parquet are `Media` that read their bytes on demand."""


def _rows(source: Path) -> Iterator[DataRow]:
    for path in row_files(source):
        yield from _parquet(path) if path.suffix == ".parquet" else Rows(path, path)


def _parquet(path: Path) -> Iterator[DataRow]:
    """Iterate over the rows of a parquet file without reading the bytes of its images."""
    number = 0
    with parquet_of(path) as file:
        leaves = [file.schema.column(i).path for i in range(len(file.schema))]
        light = [leaf for leaf in leaves if not leaf.endswith(".bytes")]
        # Without a path column an image would leave no trace, so images of bytes alone are read now.
        known = {leaf.partition(".")[0] for leaf in light}
        light += [leaf for leaf in leaves if leaf.partition(".")[0] not in known]
        heavy = {leaf.partition(".")[0]: i for i, leaf in enumerate(leaves) if leaf not in light}
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, light)
            # Where an image may lack its bytes, its whole field is read to find out.
            statistics = {name: file.metadata.row_group(group).column(i).statistics
                          for name, i in heavy.items()}  # fmt: skip
            whole = {name: file.read_row_group(group, [name])[name] for name, known in statistics.items()
                     if known is None or not known.has_null_count or known.null_count > 0}  # fmt: skip
            for i in range(table.num_rows):
                row = row_of(table, i, f"{path}[{number}]", split_of(path))
                number += 1
                if row.fault:
                    yield row
                    continue
                try:
                    images = {
                        name: LazyImages(_images_of(row, name, path, (group, i), whole.get(name)))
                        for name in heavy
                    }
                    yield replace(row, columns={**row.columns, **images})
                except RowError as error:
                    yield DataRow(row.place, row.split, fault=str(error))


def _images_of(
    row: DataRow, name: str, path: Path, cell: tuple[int, int], whole: Any
) -> Iterator[MediaRef | Media]:
    """List the images of a field; `cell` is the row group and the row in it, `whole` the field if read."""
    if whole is not None:
        images = list(media_refs(whole[cell[1]].as_py(), "image", name))
    else:
        value = row.columns[name]
        value = [] if value is None else value if isinstance(value, list) else [value]
        images = [mapping(image, name) for image in value]
    for i, image in enumerate(images):
        if isinstance(image, MediaRef) and not image.data:
            yield image
        else:
            load = lambda i=i: _read(path, cell, name, i)
            yield Media("image", f"{name} {i} of {row.place}", load, path)


def _read(path: Path, cell: tuple[int, int], name: str, i: int) -> Frames:
    file = _opened(path, path.stat().st_mtime_ns)
    image = list(media_refs(file.read_row_group(cell[0], [name])[name][cell[1]].as_py(), "image", name))[i]
    return decode_image(image.data, f"{name} {i} of row {cell[1]} in group {cell[0]} of '{path}'")


@lru_cache(maxsize=64)
def _opened(path: Path, changed: int) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path)
