"""Preference pairs about pictures: a better answer and a worse one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mmrl.registry import data
from mmrl.rows import DataRow, RowError, row_files, sound_rows, split_of
from mmrl.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.vision.asking import distinct, interleaved
from mmrl.vision.media import MediaRoot, decode_image
from mmrl.vision.named_media import Named, named
from mmrl.vision.video import MediaError

log = logging.getLogger("mmrl")
SIDES = ("chosen", "rejected")
SPENT = ("image", "images", "prompt", "conversations", *SIDES, "chosen_answer", "rejected_answer")


@data
def preference_pairs(
    *,
    path: str,
    root: str = "",
    min_gap: float = 0.0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: int = 0,
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
    prompts, bad, close = [], [], 0
    for number, row in enumerate(_rows(source)):
        try:
            prompt = _prompt(row, number, media)
        except (RowError, MediaError) as error:
            bad.append(f"{row.place}: {error}")
            continue
        better, worse = (answer.recorded["score"] for answer in prompt.answers)
        if abs(better - worse) < min_gap:
            close += 1
            continue
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if bad and bad_rows == "error":
        shown = "\n  ".join(bad[:10])
        raise RowError(
            f"{len(bad)} rows of '{source}' cannot be used; mend them, or set `bad_rows: drop`:\n  {shown}"
        )
    for line in bad:
        log.warning("dropped %s", line)
    if close:
        log.warning("left out %d pairs of '%s' that are less than %g apart", close, source, min_gap)
    return distinct(prompts, path)


def _prompt(row: DataRow, number: int, root: MediaRoot) -> Prompt:
    columns = row.columns
    shown = [
        _medium(one, row.place, root) for name in ("image", "images") for one in _media_in(columns.get(name))
    ]
    uid = str(columns["id"]) if columns.get("id") is not None else f"{row.split}#{number}"
    kept = {key: value for key, value in columns.items() if key not in SPENT}
    answers = tuple(_answer(columns, side) for side in SIDES)
    return Prompt(uid, _asked(columns.get("prompt"), shown), None, answers, kept)


def _answer(columns: Mapping[str, Any], side: str) -> Outcome:
    text = _text_of(columns.get(side))
    if not text.strip():
        raise RowError(f"wanted a text as `{side}`, got {columns.get(side)!r}")
    preferred, told = float(side == "chosen"), columns.get(f"score_{side}")
    return Outcome(
        text=text, recorded={"preferred": preferred, "score": preferred if told is None else float(told)}
    )


def _asked(prompt: Any, media: list[Media]) -> tuple[Message, ...]:
    """Read what is asked, a text or messages; the media stand in the first turn of the user."""
    turns = [{"role": "user", "content": prompt}] if type(prompt) is str else prompt
    messages, left = [], media
    for turn in turns or ():
        text = _text_of(turn)
        if turn.get("role") == "user" and left:
            messages.append(Message("user", interleaved(text, left)))
            left = []
        else:
            messages.append(Message(turn.get("role") or "user", (Part(text),)))
    if not messages or left or not any(part.text for message in messages for part in message.parts):
        raise RowError(f"wanted a `prompt` with a turn of the user, got {prompt!r}")
    return tuple(messages)


def _text_of(said: Any) -> str:
    """Read a text, a message, or the last of several; a picture among its parts is a mark."""
    match said:
        case str():
            return said
        case {"content": content}:
            return _text_of(content)
        case [*parts] if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
            return "".join(part.get("text") or f"<{part['type']}>" for part in parts)
        case [*_, last]:
            return _text_of(last)
    return ""


# ---- pictures


def _media_in(value: Any) -> Iterator[Named | Media]:
    """List what a column names; what is read later is a medium already."""
    match value:
        case Media():
            yield value
        case [Media(), *_]:
            yield from value
        case _:
            yield from named(value, "image")


def _medium(one: Named | Media, place: str, root: MediaRoot) -> Media:
    match one:
        case Media():
            return one
        case Named(data=bytes(data), path=path) if data:
            name = path or f"the picture of {place}"
            return Media("image", name, lambda: decode_image(data, name))
    root.locate(one.path)
    return root.image(one.path)


def _rows(source: Path) -> Iterator[DataRow]:
    """Go through rows. Of parquet with pictures in it, these are not read yet."""
    files = row_files(source)
    for path in files:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            yield from sound_rows(path)


def _parquet(path: Path) -> Iterator[DataRow]:
    file = _opened(path, path.stat().st_mtime_ns)
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    encoded = {leaf.partition(".")[0] for leaf in leaves if leaf.endswith(".bytes")}
    number = 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, [leaf for leaf in leaves if not leaf.endswith(".bytes")])
        for at, row in enumerate(table.to_pylist()):
            place = f"{path}[{number}]"
            held = {name: _later(path, group, at, name, row.get(name), place) for name in encoded}
            yield DataRow(place, split_of(path), row | held)
            number += 1


def _later(path: Path, group: int, at: int, name: str, shown: Any, place: str) -> list[Media]:
    """Name the pictures of a row; each is read when somebody looks at it."""
    count = len(shown) if type(shown) is list else int(shown is not None)
    return [
        Media("image", f"{name} {i} of {place}", lambda i=i: _read(path, group, at, name, i))
        for i in range(count)
    ]


def _read(path: Path, group: int, at: int, name: str, number: int) -> Frames:
    value = _opened(path, path.stat().st_mtime_ns).read_row_group(group, [name])[name][at].as_py()
    one = list(named(value, "image"))[number]
    if not one.data:
        return MediaRoot(path.parent).image(one.path).load()
    return decode_image(one.data, f"{name} {number} of row {at} in group {group} of '{path}'")


@lru_cache(maxsize=64)
def _opened(path: Path, changed: int) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path)
