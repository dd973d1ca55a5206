"""Published annotation files of temporal grounding, read exactly as they are."""

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
from mmrl.vision.benchmarks.qvhighlights import CLIP_SECONDS, clip_scores
from mmrl.vision.benchmarks.time_spans import Span

LONGEST = 1e6  # seconds that a video may last; scores are laid over every two of them


@dataclass(frozen=True)
class Row:
    """One query about one video. `duration` is None where the file does not tell."""

    uid: str
    video: str
    query: str
    spans: tuple[Span, ...]
    duration: float | None
    saliency: tuple[tuple[float, ...], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Annotations:
    """An annotation file in a published form. `rows` are as they stand; `read` makes a query of one, or
    raises a `RowError`."""

    path: Path
    form: str = "jsonl"
    durations: str = ""  # a CSV, for Charades-STA
    extension: str = ".mp4"

    @property
    def rows(self) -> Iterator[DataRow]:
        """Go through the rows of the file."""
        return FORMS[self.form][0](self.path)

    @property
    def read(self) -> Callable[[DataRow], Row]:
        """Give what reads one row."""
        lengths = _read_lengths(Path(self.durations)) if self.durations else {}
        return lambda row: FORMS[self.form][1](row, lengths, self.extension)


def _read_lengths(path: Path) -> dict[str, float]:
    """Read the columns `id` and `length` of a CSV."""
    lengths: dict[str, float] = {}
    table = csv.DictReader(io.StringIO(read_text_file(path), newline=""))
    try:
        for row in table:
            lengths[text(row.get("id"), "id")] = _seconds(float(text(row.get("length"), "length")), "length")
    except (csv.Error, ValueError) as error:
        place = f"{path}:{table.line_num}"
        raise SourceError(f"{place}: wanted columns `id` and `length` in seconds: {error}") from error
    return lengths


def charades_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Row:
    """Read Charades-STA: `<video> <start> <end>##<sentence>` a line; durations come from a CSV."""
    line = row.columns["line"]
    left, mark, sentence = line.partition("##")
    try:
        video, start, end = left.split()
        span = number(float(start), "start"), number(float(end), "end")
    except ValueError:
        mark = ""
    if not mark or not sentence.strip():
        raise RowError(f"wanted '<video> <start> <end>##<sentence>', got {short(line)}")
    return Row(f"{video}#{_line(row)}", video + extension, sentence, (span,), lengths.get(video))


def _activitynet_rows(path: Path) -> Iterator[DataRow]:
    """Go through the sentences of all videos of one object."""
    source = read_text_file(path)
    try:
        videos = mapping(parse_json(source), "videos")
    except RowError as error:
        raise SourceError(f"{path}: not a JSON object: {error}") from error
    for video, entry in videos.items():
        try:
            held = mapping(entry, video)
            spans = listed(held.get("timestamps"), "timestamps")
            sentences = listed(held.get("sentences"), "sentences", len(spans))
        except RowError as error:
            yield DataRow(f"{path}: '{video}'", "", fault=str(error))
            continue
        for i, (span, sentence) in enumerate(zip(spans, sentences, strict=True)):
            columns = {"id": f"{video}#{i}", "video": video, "span": span, "query": sentence}
            columns["duration"] = held.get("duration")
            yield checked(DataRow(f"{path}: '{video}'[{i}]", "", columns))


def activitynet_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Row:
    """Read ActivityNet Captions, or Charades-STA as JSON: `{video: {duration, timestamps, sentences}}`; other
    keys are ignored."""
    held = row.columns
    spans = (_span(held["span"], "timestamps"),)
    video, query = text(held["video"], "video"), text(held["query"], "sentences")
    return Row(held["id"], video + extension, query, spans, _seconds(held["duration"], "duration"))


def qvhighlights_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Row:
    """Read QVHighlights: one object a line with qid, query, vid, duration, relevant_windows, and saliency of
    clips of 2 s."""
    held = row.columns
    windows = listed(held.get("relevant_windows"), "relevant_windows")
    spans = tuple(_span(window, "relevant_windows") for window in windows)
    duration = _seconds(held.get("duration"), "duration")
    saliency: tuple[tuple[float, ...], ...] = ()
    if held.get("saliency_scores") is not None:
        scores = _ratings(held["saliency_scores"], "saliency_scores")
        clips = listed(held.get("relevant_clip_ids"), "relevant_clip_ids", len(scores))
        count = int(duration / CLIP_SECONDS)
        for clip in clips:
            if type(clip) is not int or not 0 <= clip < count:
                raise RowError(f"there is no clip {short(clip)} of two seconds in {duration:g} s")
        saliency = tuple(map(tuple, clip_scores(held)))
    if held.get("qid") is None:
        raise RowError("wanted a `qid`")
    video, query = text(held.get("vid"), "vid"), text(held.get("query"), "query")
    return Row(uid_of(held, "", "qid"), video + extension, query, spans, duration, saliency, held)


def jsonl_row(row: DataRow, lengths: Mapping[str, float], extension: str) -> Row:
    """Read the plain form: `video`, `query`, and `start` and `end` or a list `spans`; `duration`, `id`,
    `saliency` (the three ratings of every clip of 2 s) and others if there are. A row without any of the
    three is unlabelled."""
    held = row.columns
    name, pairs = "spans", [] if held.get("spans") is None else listed(held["spans"], "spans")
    if not pairs and (held.get("start") is not None or held.get("end") is not None):
        name, pairs = "span", [[held.get("start"), held.get("end")]]
    video, query = text(held.get("video"), "video"), text(held.get("query"), "query")
    return Row(
        uid_of(held, f"{video}#{_line(row)}"),
        video,
        query,
        tuple(_span(pair, name) for pair in pairs),
        None if held.get("duration") is None else _seconds(held["duration"], "duration"),
        () if held.get("saliency") is None else _ratings(held["saliency"], "saliency"),
        held,
    )


FORMS = {
    "charades_sta": (text_lines, charades_row),
    "activitynet": (_activitynet_rows, activitynet_row),
    "qvhighlights": (json_lines, qvhighlights_row),
    "jsonl": (json_lines, jsonl_row),
}


def _line(row: DataRow) -> str:
    """Give the number of the row's line, which names rows without an id."""
    return row.place.rpartition(":")[2]


def _span(pair: Any, name: str) -> Span:
    start, end = listed(pair, name, 2)
    return number(start, f"{name}: start"), number(end, f"{name}: end")


def _seconds(value: Any, name: str) -> float:
    """Let a duration through."""
    if not 0 < number(value, name) <= LONGEST:
        raise RowError(f"wanted more than 0 and at most {LONGEST:g} seconds as `{name}`, got {short(value)}")
    return float(value)


def _ratings(value: Any, name: str) -> tuple[tuple[float, ...], ...]:
    """Let the ratings of clips through, three each."""
    clips = [listed(clip, name, 3) for clip in listed(value, name)]
    return tuple(tuple(number(rating, name) for rating in clip) for clip in clips)


def check_spans(spans: tuple[Span, ...], duration: float, cut: bool) -> tuple[tuple[Span, ...], str]:
    """Cut spans to their video, or tell in words what is wrong with them."""
    if not spans:
        return (), "it has no span"
    for start, end in spans:
        if not start < end < math.inf:
            return (), f"the span {start:g} to {end:g} s does not end after it starts"
        if not 0 <= start < duration < math.inf:
            return (), f"the span {start:g} to {end:g} s lies outside its video of {duration:g} s"
    return tuple((start, min(end, duration)) for start, end in spans) if cut else spans, ""
