"""Checks of data sets: images, videos, and time spans in videos."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from mmrl.config.registry import check
from mmrl.data.dataset_io import DataRow, Rows
from mmrl.data.fields import RowError, number
from mmrl.data.media_root import MediaRef, MediaRoot, media_of
from mmrl.data.video import FrameSampling, video_duration
from mmrl.diagnostics.context import Finding
from mmrl.runtime.content_hash import of_file
from mmrl.vision.benchmarks.grounding_annotations import spans_of

# Sample small frames from the whole video, so that truncated files are detected.
THUMBNAILS = FrameSampling(frames_per_second=1.0, min_frames=4, max_frames=64, max_pixels=4096)
SLACK = 0.05  # seconds by which a span may exceed its video, because of rounding
T = TypeVar("T")


@check(on="data")
def unreadable_media(rows: Rows) -> Iterator[Finding]:
    """Report media that are missing, broken or outside the media root; every file is decoded once."""
    root = MediaRoot(rows.root, cache_bytes=0)

    def fault(ref: MediaRef) -> str:
        try:
            root.medium(ref, "the row", THUMBNAILS).load()
        except (ValueError, OSError) as error:  # raised by broken media, or for invalid file names
            return str(error)
        return ""

    fault_of_file = cache(fault)
    for row in rows.valid():
        try:
            media = dict.fromkeys(media_of(row.columns))
        except RowError as error:
            yield Finding(str(error), place=row.place)
            continue
        for ref in media:
            # Do not cache results for images inside rows, because the cache keys would hold their bytes.
            if what := fault(ref) if ref.data else fault_of_file(ref):
                yield Finding(what, place=row.place)


@check(on="data")
def missing_media(rows: Rows) -> Iterator[Finding]:
    """Report rows without an image or video, if other rows of the same file have media."""
    having = Counter(row.source for row in rows.valid() if _media(row))
    for row in rows.valid():
        if having[row.source] and _media(row) == []:
            what = f"names no image or video; {having[row.source]} rows of its file do"
            yield Finding(what, place=row.place)


def _media(row: DataRow) -> list[MediaRef] | None:
    """List the media of a row; None if their format is wrong (reported by `unreadable_media`)."""
    try:
        return list(media_of(row.columns))
    except RowError:
        return None


@check(on="data")
def spans_out_of_range(rows: Rows) -> Iterator[Finding]:
    """Report time spans that do not end after they start, or lie outside their video.

    The duration is read from the video file if possible, otherwise from the column `duration`.
    """
    root = MediaRoot(rows.root, cache_bytes=0)
    length = cache(lambda path: _read(root, path, video_duration))
    for row in rows.valid():
        claimed = row.columns.get("duration")
        try:
            spans = spans_of(row.columns, ("spans", "relevant_windows"))
            claimed = None if claimed is None else number(claimed, "duration")
        except RowError as error:
            yield Finding(str(error), place=row.place)
            continue
        if not spans and claimed is None:
            continue
        videos = [ref.path for ref in _media(row) or () if ref.kind == "video" and ref.path]
        measured = next((seconds for path in videos if (seconds := length(path)) is not None), None)
        duration = claimed if measured is None else measured
        # The same tolerance as that of `read_video` for the duration in a file's header.
        if None not in (measured, claimed) and abs(measured - claimed) > max(1.0, 0.05 * claimed):
            yield Finding(f"its video lasts {measured:.2f} s, not {claimed:g} s", place=row.place)
        for start, end in spans:
            what = f"the span {start:g} to {end:g} s"
            if not start < end:
                yield Finding(f"{what} does not end after it starts", place=row.place)
            elif start < 0 or (duration is not None and end > duration + SLACK):
                lasts = "" if duration is None else f" of {duration:.2f} s"
                yield Finding(f"{what} lies outside its video{lasts}", place=row.place)


@check(on="data")
def split_leakage(rows: Rows) -> Iterator[Finding]:
    """Report media with the same content in two splits, such as training and test."""
    root = MediaRoot(rows.root)
    digest = cache(lambda path: _read(root, path, of_file))  # cached: rows may name the same file
    first: dict[str, tuple[str, str]] = {}  # maps a content hash to the first (split, place) that has it
    reported: set[tuple[str, str]] = set()
    for row in rows.valid():
        for ref in _media(row) or ():
            content = hashlib.sha256(ref.data).hexdigest() if ref.data else digest(ref.path)
            if not content:
                continue
            place = f"{row.place} ({ref.path or 'inside the row'})"
            split, place = first.setdefault(content, (row.split, place))
            if split != row.split and (content, row.split) not in reported:  # report once per split
                reported.add((content, row.split))
                what = f"'{ref.path}' of split '{row.split}' is also in split '{split}': {place}"
                yield Finding(what, place=row.place)


def _read(root: MediaRoot, path: str, read: Callable[[Path], T]) -> T | None:
    """Read a file of the media root; None if reading fails (reported by `unreadable_media`)."""
    try:
        return read(root.locate(path))
    except (ValueError, OSError):
        return None
