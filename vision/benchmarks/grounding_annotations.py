"""Readers of published annotation files of temporal grounding, in their exact formats."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.data.dataset_io import (
    DataRow,
    SourceError,
    checked,
    json_lines,
    parse_json,
    read_text_file,
    text_lines,
)
from mmrl.data.fields import RowError, listed, mapping, number, short, text, uid_of
from mmrl.vision.benchmarks.qvhighlights import WINDOW_SECONDS, saliency_of_windows
from mmrl.vision.benchmarks.time_spans import Span

LONGEST = 1e6  # seconds of a video; saliency takes memory for every two of them


@dataclass(frozen=True)
class Query:
    """One query about one video, in seconds; `duration` is None where the file does not contain it."""

    uid: str
    video: str
    query: str
    spans: tuple[Span, ...]
    duration: float | None
    saliency: tuple[tuple[float, ...], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Annotations:
    """An annotation file in a published form.

    Args:
        path: The file.
        form: A key of `FORMS`.
        durations: CSV with the columns `id` and `length` in seconds, for Charades-STA.
        extension: Suffix that turns a video id into a file name.
    """

    path: Path
    form: str = "jsonl"
    durations: str = ""
    extension: str = ".mp4"

    @property
    def rows(self) -> Iterator[DataRow]:
        """Iterate over the raw rows of the file."""
        return FORMS[self.form][0](self.path)

    @property
    def read(self) -> Callable[[DataRow], Query]:
        """Return a function that parses a raw row, or raises a `RowError`."""
        lengths: dict[str, float] = {}
        if self.durations:
            table = csv.DictReader(io.StringIO(read_text_file(Path(self.durations)), newline=""))
            try:
                for row in table:
                    length = float(text(row.get("length"), "length"))
                    lengths[text(row.get("id"), "id")] = _seconds(length, "length")
            except (csv.Error, ValueError) as error:
                place = f"{self.durations}:{table.line_num}"
                raise SourceError(f"{place}: wanted columns `id` and `length` in seconds: {error}") from error
        return lambda row: FORMS[self.form][1](row, lengths, self.extension)


def charades_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Query:
    """Parse a line of Charades-STA: `<video> <start> <end>##<sentence>`; durations come from a CSV."""
    line = row.columns["line"]
    left, mark, sentence = line.partition("##")
    try:
        video, start, end = left.split()
        span = number(float(start), "start"), number(float(end), "end")
    except ValueError:
        mark = ""
    if not mark or not sentence.strip():
        raise RowError(f"wanted '<video> <start> <end>##<sentence>', got {short(line)}")
    return Query(f"{video}#{_line(row)}", video + extension, sentence, (span,), lengths.get(video))


def _activitynet_rows(path: Path) -> Iterator[DataRow]:
    """Iterate over the sentences of all videos in one JSON object."""
    source = read_text_file(path)
    try:
        videos = mapping(parse_json(source), "videos")
    except RowError as error:
        raise SourceError(f"{path}: not a JSON object: {error}") from error
    for video, entry in videos.items():
        try:
            columns = mapping(entry, video)
            spans = listed(columns.get("timestamps"), "timestamps")
            sentences = listed(columns.get("sentences"), "sentences", len(spans))
        except RowError as error:
            yield DataRow(f"{path}: '{video}'", "", fault=str(error))
            continue
        for i, (span, sentence) in enumerate(zip(spans, sentences, strict=True)):
            row = {"id": f"{video}#{i}", "video": video, "span": span, "query": sentence}
            row["duration"] = columns.get("duration")
            yield checked(DataRow(f"{path}: '{video}'[{i}]", "", row))


def activitynet_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Query:
    """Parse a sentence of ActivityNet Captions, or of Charades-STA as JSON.

    The file is `{video: {duration, timestamps, sentences}}`; other keys are ignored.
    """
    columns = row.columns
    spans = (_span(columns["span"], "timestamps"),)
    video, query = text(columns["video"], "video"), text(columns["query"], "sentences")
    return Query(columns["id"], video + extension, query, spans, _seconds(columns["duration"], "duration"))


def qvhighlights_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Query:
    """Parse a line of QVHighlights.

    It is an object with qid, query, vid, duration, relevant_windows, and optionally saliency_scores of the
    two-second windows relevant_clip_ids.
    """
    columns = row.columns
    windows = listed(columns.get("relevant_windows"), "relevant_windows")
    spans = tuple(_span(window, "relevant_windows") for window in windows)
    duration = _seconds(columns.get("duration"), "duration")
    saliency: tuple[tuple[float, ...], ...] = ()
    if columns.get("saliency_scores") is not None:
        scores = _ratings(columns["saliency_scores"], "saliency_scores")
        count = int(duration / WINDOW_SECONDS)
        for window in listed(columns.get("relevant_clip_ids"), "relevant_clip_ids", len(scores)):
            if type(window) is not int or not 0 <= window < count:
                raise RowError(f"there is no window {short(window)} of two seconds in {duration:g} s")
        saliency = tuple(map(tuple, saliency_of_windows(columns)))
    if columns.get("qid") is None:
        raise RowError("wanted a `qid`")
    video, query = text(columns.get("vid"), "vid"), text(columns.get("query"), "query")
    return Query(uid_of(columns, "", "qid"), video + extension, query, spans, duration, saliency, columns)


def jsonl_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Query:
    """Parse the toolkit's own form: `video`, `query`, and `start` and `end` or a list `spans`.

    `duration`, `id`, `saliency` (three ratings of every two-second window) and other columns are optional. A
    row without `start`, `end` and `spans` is unlabelled.
    """
    columns = row.columns
    name, pairs = "spans", [] if columns.get("spans") is None else listed(columns["spans"], "spans")
    if not pairs and (columns.get("start") is not None or columns.get("end") is not None):
        name, pairs = "span", [[columns.get("start"), columns.get("end")]]
    video, query = text(columns.get("video"), "video"), text(columns.get("query"), "query")
    return Query(
        uid_of(columns, f"{video}#{_line(row)}"),
        video,
        query,
        tuple(_span(pair, name) for pair in pairs),
        None if columns.get("duration") is None else _seconds(columns["duration"], "duration"),
        () if columns.get("saliency") is None else _ratings(columns["saliency"], "saliency"),
        columns,
    )


FORMS = {
    "charades_sta": (text_lines, charades_row),
    "activitynet": (_activitynet_rows, activitynet_row),
    "qvhighlights": (json_lines, qvhighlights_row),
    "jsonl": (json_lines, jsonl_row),
}


def _line(row: DataRow) -> str:
    """Return the line number of a row, which identifies rows without an id."""
    return row.place.rpartition(":")[2]


def _span(pair: Any, name: str) -> Span:
    start, end = listed(pair, name, 2)
    return number(start, f"{name}: start"), number(end, f"{name}: end")


def _seconds(value: Any, name: str) -> float:
    if not 0 < number(value, name) <= LONGEST:
        raise RowError(f"wanted more than 0 and at most {LONGEST:g} seconds as `{name}`, got {short(value)}")
    return float(value)


def _ratings(value: Any, name: str) -> tuple[tuple[float, ...], ...]:
    """Validate the ratings of windows, three each."""
    windows = [listed(window, name, 3) for window in listed(value, name)]
    return tuple(tuple(number(rating, name) for rating in window) for window in windows)


def check_spans(spans: tuple[Span, ...], duration: float, trim: bool) -> tuple[tuple[Span, ...], str]:
    """Return spans, with `trim` cut to their video, and an error text that is empty if they are valid."""
    if not spans:
        return (), "it has no span"
    for start, end in spans:
        if not start < end < math.inf:
            return (), f"the span {start:g} to {end:g} s does not end after it starts"
        if not 0 <= start < duration < math.inf:
            return (), f"the span {start:g} to {end:g} s lies outside its video of {duration:g} s"
    return tuple((start, min(end, duration)) for start, end in spans) if trim else spans, ""
