"""Preference pairs about pictures: a better answer and a worse one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, Rows, parquet_of, read_prompts, row_files, row_of, split_of
from mmrl.data.fields import RowError, listed, mapping, number, short, text, uid_of
from mmrl.vision.media.media_columns import MediaRef, media_refs
from mmrl.vision.media.media_root import MediaRoot, decode_image
from mmrl.vision.media.prompts import interleaved

log = logging.getLogger("mmrl")
ROLES = ("system", "user", "assistant")
SIDES = ("chosen", "rejected")
SPENT = ("image", "images", "prompt", "conversations", *SIDES, "chosen_answer", "rejected_answer")


@data
def preference_pairs(
    *,
    path: str,
    root: str = "",
    min_gap: NonNegativeFloat = 0.0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> list[Prompt]:
    """Read pairs as TRL has them, jsonl, JSON, parquet or a folder of these: `prompt`, `chosen`, `rejected`,
    and `images` or `image`.

    Texts may be messages. Pictures are paths under `root` (by default the folder of the rows) or encoded;
    those inside parquet are read when somebody looks at them. The answers, the better one first, record
    `preferred`, 1 and 0, and `score`, the same where the row does not tell `score_chosen` and
    `score_rejected`; pairs of which the scores are less than `min_gap` apart are left out. Rows that cannot
    be used are errors, or with `bad_rows: drop` named in the log.
    """
    source = Path(path)
    media = MediaRoot(Path(root) if root else source if source.is_dir() else source.parent)
    close = 0

    def make(row: DataRow, at: int) -> Prompt | None:
        nonlocal close
        prompt = _prompt(row, at, media)
        better, worse = (answer.recorded["score"] for answer in prompt.answers)
        if abs(better - worse) >= min_gap:
            return prompt
        close += 1
        return None

    prompts = read_prompts(source, _rows(source), make, bad_rows=bad_rows, limit=limit)
    if close:
        log.warning("left out %d pairs of '%s' that are less than %g apart", close, source, min_gap)
    return prompts


def _prompt(row: DataRow, at: int, root: MediaRoot) -> Prompt:
    columns = row.columns
    shown = [
        _medium(one, row.place, root)
        for name in ("image", "images")
        for one in _media_in(columns.get(name), name)
    ]
    kept = {key: value for key, value in columns.items() if key not in SPENT}
    answers = tuple(_answer(columns, side) for side in SIDES)
    asked = _asked(columns.get("prompt"), shown)
    return Prompt(uid_of(columns, f"{row.split}#{at}"), asked, None, answers, kept)


def _answer(columns: Mapping[str, Any], side: str) -> Outcome:
    said = text(_text_of(columns.get(side), side), side)
    preferred, told = float(side == "chosen"), columns.get(f"score_{side}")
    score = preferred if told is None else number(told, f"score_{side}")
    return Outcome(text=said, recorded={"preferred": preferred, "score": score})


def _asked(prompt: Any, media: list[Media]) -> tuple[Message, ...]:
    """Read what is asked, a text or messages; the media stand in the first turn of the user."""
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


def _text_of(said: Any, name: str) -> str:
    """Read a text, a message, or the last of several; an image among its parts is a mark."""
    match said:
        case str():
            return said
        case {"content": content}:
            return _text_of(content, f"{name}.content")
        case [*parts] if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
            return "".join(_words(part, name) for part in parts)
        case [*_, last]:
            return _text_of(last, name)
    raise RowError(f"wanted a text, a message or messages as `{name}`, got {short(said)}")


def _words(part: Mapping[str, Any], name: str) -> str:
    match part:
        case {"type": "image", **rest} if all(value is None for value in rest.values()):
            return "<image>"
        case {"type": "text", "text": str(words)}:
            return words
    raise RowError(f"wanted a text or the mark of an image as a part of `{name}`, got {short(part)}")


# ---- images


def _media_in(value: Any, name: str) -> Iterator[MediaRef | Media]:
    """List what a column names; what is read later is a medium already."""
    if isinstance(value, Later):
        yield from value
    else:
        yield from media_refs(value, "image", name)


def _medium(one: MediaRef | Media, place: str, root: MediaRoot) -> Media:
    match one:
        case Media():
            return one
        case MediaRef(data=bytes(data), path=path) if data:
            name = path or f"the image of {place}"
            return Media("image", name, lambda: decode_image(data, name), data)
    root.locate(one.path)
    return root.image(one.path)


class Later(tuple):
    """The images of a field, of which those inside parquet are read when somebody looks at them."""


def _rows(source: Path) -> Iterator[DataRow]:
    """Go through rows. Of parquet with images in it, these are not read yet."""
    for path in row_files(source):
        yield from _parquet(path) if path.suffix == ".parquet" else Rows(path, path)


def _parquet(path: Path) -> Iterator[DataRow]:
    number = 0
    with parquet_of(path) as file:
        leaves = [file.schema.column(i).path for i in range(len(file.schema))]
        light = [leaf for leaf in leaves if not leaf.endswith(".bytes")]
        # Without its path nothing would be left of an image, so images of bytes alone are read now.
        known = {leaf.partition(".")[0] for leaf in light}
        light += [leaf for leaf in leaves if leaf.partition(".")[0] not in known]
        heavy = {leaf.partition(".")[0]: i for i, leaf in enumerate(leaves) if leaf not in light}
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, light)
            whole = {name: file.read_row_group(group, [name])[name]
                     for name, leaf in heavy.items() if _has_gaps(file, group, leaf)}  # fmt: skip
            for at in range(table.num_rows):
                row = row_of(table, at, f"{path}[{number}]", split_of(path))
                yield row if row.fault else _with_images(row, path, (group, at), heavy, whole)
                number += 1


def _has_gaps(file: Any, group: int, leaf: int) -> bool:
    """Tell whether an image may lack its bytes."""
    known = file.metadata.row_group(group).column(leaf).statistics
    return known is None or not known.has_null_count or known.null_count > 0


def _with_images(
    row: DataRow, path: Path, at: tuple[int, int], heavy: Iterable[str], whole: Mapping[str, Any]
) -> DataRow:
    """Name the images of a row; `at` is its group in the file and its number in there, `whole` holds the
    fields of the group in which something may be missing."""
    found: dict[str, Later] = {}
    try:
        for name in heavy:
            if name in whole:
                held: list[Any] = list(media_refs(whole[name][at[1]].as_py(), "image", name))
            else:
                shown = row.columns[name]
                held = [] if shown is None else [mapping(one, name) for one in
                                                 (shown if isinstance(shown, list) else [shown])]  # fmt: skip
            found[name] = Later(
                one if isinstance(one, MediaRef) and not one.data else _later(path, at, name, i, row.place)
                for i, one in enumerate(held)
            )
    except RowError as error:
        return DataRow(row.place, row.split, fault=str(error))
    return replace(row, columns={**row.columns, **found})


def _later(path: Path, at: tuple[int, int], name: str, i: int, place: str) -> Media:
    return Media("image", f"{name} {i} of {place}", lambda: _read(path, at, name, i), path)


def _read(path: Path, at: tuple[int, int], name: str, i: int) -> Frames:
    value = _opened(path, path.stat().st_mtime_ns).read_row_group(at[0], [name])[name][at[1]].as_py()
    one = list(media_refs(value, "image", name))[i]
    return decode_image(one.data, f"{name} {i} of row {at[1]} in group {at[0]} of '{path}'")


@lru_cache(maxsize=64)
def _opened(path: Path, changed: int) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path)
