"""What may be wrong with the pictures and clips of a data set, and with spans in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mmrl.registry import data_check
from mmrl.rows import DataRow, Finding, Rows
from mmrl.types import Frames
from mmrl.vision.media import MediaRoot, decode_image
from mmrl.vision.named_media import Named, media_of
from mmrl.vision.video import MediaError, Sampling, video_duration

# Small frames, but up to the end, so that a clip that breaks off is noticed.
THUMBNAILS = Sampling(frames_per_second=1.0, min_frames=4, max_frames=64, max_pixels=4096)
SLACK = 0.05  # seconds a span may reach beyond its clip: annotations are rounded
BLOCK = 1 << 20


@data_check
def broken_media(rows: Rows) -> Iterator[Finding]:
    """Find media that are missing, broken, or outside their root; each is decoded once."""
    root = MediaRoot(rows.root, cache_bytes=0)
    fault = cache(lambda kind, path: _fault(root, Named(kind, path)))
    for row in rows.sound():
        for named in dict.fromkeys(media_of(row.columns)):
            what = _fault(root, named) if named.data else fault(named.kind, named.path)
            if what:
                yield Finding(row.place, what)


def _fault(root: MediaRoot, named: Named) -> str:
    """Decode a medium; tell what is wrong with it."""
    try:
        _decoded(root, named)
    except (ValueError, OSError) as error:  # names that no file system knows, besides media errors
        return str(error)
    return ""


def _decoded(root: MediaRoot, named: Named) -> Frames:
    if named.data and named.kind == "image":
        return decode_image(named.data, named.path or "the picture in the row")
    if named.data:
        raise MediaError("a clip inside a row cannot be read; write it to a file and name that")
    medium = root.image(named.path) if named.kind == "image" else root.video(named.path, THUMBNAILS)
    return medium.load()


@data_check
def spans_outside(rows: Rows) -> Iterator[Finding]:
    """Find spans that do not end after they start, or lie outside their clip (its file tells how long it is,
    else the row's `duration`)."""
    root = MediaRoot(rows.root, cache_bytes=0)
    length = cache(lambda path: _length(root, path))
    for row in rows.sound():
        for what in _wrong_spans(row, length):
            yield Finding(row.place, what)


def _wrong_spans(row: DataRow, length: Any) -> Iterator[str]:
    try:
        spans = spans_of(row.columns)
        said = None if row.columns.get("duration") is None else float(row.columns["duration"])
    except (KeyError, TypeError, ValueError) as error:
        yield f"its spans or duration are no numbers: {type(error).__name__}: {error}"
        return
    if not spans and said is None:
        return
    found = [length(named.path) for named in media_of(row.columns) if named.kind == "video" and named.path]
    known = [seconds for seconds in [*found, said] if seconds is not None]
    duration = known[0] if known else None
    if found and found[0] is not None and said is not None and abs(found[0] - said) > max(1.0, 0.05 * said):
        yield f"its clip lasts {found[0]:.2f} s, not {said:g} s"
    for start, end in spans:
        if not start < end:
            yield f"the span {start:g} to {end:g} s does not end after it starts"
        elif start < 0 or (duration is not None and end > duration + SLACK):
            clip = "" if duration is None else f" of {duration:.2f} s"
            yield f"the span {start:g} to {end:g} s lies outside its clip{clip}"


def spans_of(columns: Mapping[str, Any]) -> list[tuple[float, float]]:
    """List the spans of a row in seconds: `start` and `end`, `spans`, or `relevant_windows`."""
    pairs = columns.get("spans") or columns.get("relevant_windows") or []
    if not pairs and columns.get("start") is not None and "end" in columns:
        pairs = [(columns["start"], columns["end"])]
    return [(float(start), float(end)) for start, end in pairs]


def _length(root: MediaRoot, path: str) -> float | None:
    try:
        return video_duration(root.locate(path))
    except (ValueError, OSError):
        return None  # `broken_media` tells


@data_check
def shared_media(rows: Rows) -> Iterator[Finding]:
    """Find media with the same content in two splits: what is held out would have been trained on."""
    root = MediaRoot(rows.root)
    digest = cache(lambda path: _digest(root, path))
    seen: dict[str, tuple[str, str]] = {}
    told: set[tuple[str, str]] = set()
    for row in rows.sound():
        for named in media_of(row.columns):
            mark = hashlib.sha256(named.data).hexdigest() if named.data else digest(named.path)
            if not mark:
                continue
            split, place = seen.setdefault(
                mark, (row.split, f"{row.place} ({named.path or 'inside the row'})")
            )
            if split != row.split and (mark, row.split) not in told:
                told.add((mark, row.split))
                what = f"'{named.path}' of split '{row.split}' is also in split '{split}': {place}"
                yield Finding(row.place, what)


def _digest(root: MediaRoot, path: str) -> str:
    """Hash a file; empty where there is none."""
    try:
        located = root.locate(path)
    except (ValueError, OSError):
        return ""
    hashed = hashlib.sha256()
    with located.open("rb") as file:
        while block := file.read(BLOCK):
            hashed.update(block)
    return hashed.hexdigest()
