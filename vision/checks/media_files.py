"""Checks of data: images, videos, and time spans in videos."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mmrl.config.registry import check
from mmrl.data.dataset_io import DataRow, Rows
from mmrl.data.fields import RowError, listed, number
from mmrl.diagnostics.context import Finding
from mmrl.vision.media.media_root import MediaRef, MediaRoot, decode_image, media_of
from mmrl.vision.media.video import FrameSampling, MediaError, video_duration

# Small frames, but up to the end, so that a truncated video is found.
THUMBNAILS = FrameSampling(frames_per_second=1.0, min_frames=4, max_frames=64, max_pixels=4096)
SLACK = 0.05  # seconds a span may end after its video: annotations are rounded


@check(on="data")
def unreadable_media(rows: Rows) -> Iterator[Finding]:
    """Find media that are missing, broken or outside their root; each is decoded once."""
    root = MediaRoot(rows.root, cache_bytes=0)
    fault = cache(lambda kind, path: _fault(root, MediaRef(kind, path)))
    for row in rows.valid():
        try:
            media = dict.fromkeys(media_of(row.columns))
        except RowError as error:
            yield Finding(str(error), place=row.place)
            continue
        for named in media:
            what = _fault(root, named) if named.data else fault(named.kind, named.path)
            if what:
                yield Finding(what, place=row.place)


@check(on="data")
def missing_media(rows: Rows) -> Iterator[Finding]:
    """Find rows without an image or a video in files where other rows have one."""
    having = Counter(row.source for row in rows.valid() if _media(row))
    for row in rows.valid():
        if having[row.source] and _media(row) == []:
            yield Finding(
                f"names no image or video; {having[row.source]} rows of its file do", place=row.place
            )


def _media(row: DataRow) -> list[MediaRef] | None:
    """The media of a row; None where their form is unknown, which `unreadable_media` reports."""
    try:
        return list(media_of(row.columns))
    except RowError:
        return None


def _fault(root: MediaRoot, named: MediaRef) -> str:
    """Decode a medium; returns the error, or nothing."""
    try:
        if named.data and named.kind == "image":
            decode_image(named.data, named.path or "the image in the row")
        elif named.data:
            raise MediaError("a video inside a row cannot be read; write it to a file and name that")
        elif named.kind == "image":
            root.image(named.path).load()
        else:
            root.video(named.path, THUMBNAILS).load()
    except (ValueError, OSError) as error:  # names that no file system knows, besides media errors
        return str(error)
    return ""


@check(on="data")
def spans_out_of_range(rows: Rows) -> Iterator[Finding]:
    """Find spans that do not end after they start, or lie outside their video.

    The duration is that of the file, or else the `duration` of the row.
    """
    root = MediaRoot(rows.root, cache_bytes=0)
    length = cache(lambda path: _length(root, path))
    for row in rows.valid():
        for what in _wrong_spans(row, length):
            yield Finding(what, place=row.place)


def _wrong_spans(row: DataRow, length: Any) -> Iterator[str]:
    try:
        spans = spans_of(row.columns)
        given = row.columns.get("duration")
        claimed = None if given is None else number(given, "duration")
    except RowError as error:
        yield str(error)
        return
    if not spans and claimed is None:
        return
    lengths = [length(named.path) for named in _media(row) or () if named.kind == "video" and named.path]
    known = [seconds for seconds in [*lengths, claimed] if seconds is not None]
    duration = known[0] if known else None
    both = lengths and lengths[0] is not None and claimed is not None
    if both and abs(lengths[0] - claimed) > max(1.0, 0.05 * claimed):
        yield f"its video lasts {lengths[0]:.2f} s, not {claimed:g} s"
    for start, end in spans:
        if not start < end:
            yield f"the span {start:g} to {end:g} s does not end after it starts"
        elif start < 0 or (duration is not None and end > duration + SLACK):
            lasts = "" if duration is None else f" of {duration:.2f} s"
            yield f"the span {start:g} to {end:g} s lies outside its video{lasts}"


def spans_of(columns: Mapping[str, Any]) -> list[tuple[float, float]]:
    """List the spans of a row in seconds: `start` and `end`, `spans`, or `relevant_windows`."""
    names = [name for name in ("spans", "relevant_windows") if columns.get(name) is not None]
    pairs = listed(columns[names[0]], names[0]) if names else []
    if not pairs and (columns.get("start") is not None or columns.get("end") is not None):
        pairs, names = [(columns.get("start"), columns.get("end"))], ["span"]
    return [
        (number(start, f"{names[0]}: start"), number(end, f"{names[0]}: end"))
        for start, end in (listed(pair, names[0], 2) for pair in pairs)
    ]


def _length(root: MediaRoot, path: str) -> float | None:
    try:
        return video_duration(root.locate(path))
    except (ValueError, OSError):
        return None  # `unreadable_media` reports it


@check(on="data")
def split_leakage(rows: Rows) -> Iterator[Finding]:
    """Find media with the same content in two splits, which would be trained on and tested on."""
    root = MediaRoot(rows.root)
    digest = cache(lambda path: _digest(root, path))
    seen: dict[str, tuple[str, str]] = {}
    reported: set[tuple[str, str]] = set()
    for row in rows.valid():
        for named in _media(row) or ():
            content = hashlib.sha256(named.data).hexdigest() if named.data else digest(named.path)
            if not content:
                continue
            split, place = seen.setdefault(
                content, (row.split, f"{row.place} ({named.path or 'inside the row'})")
            )
            if split != row.split and (content, row.split) not in reported:
                reported.add((content, row.split))
                what = f"'{named.path}' of split '{row.split}' is also in split '{split}': {place}"
                yield Finding(what, place=row.place)


def _digest(root: MediaRoot, path: str) -> str:
    """The SHA-256 of a file; empty if it cannot be found."""
    try:
        located = root.locate(path)
    except (ValueError, OSError):
        return ""
    with located.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
