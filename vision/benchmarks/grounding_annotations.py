"""Readers of the published annotation formats of temporal grounding (moments of a video for a query)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from mmrl.data.dataset_io import (
    DataRow,
    SourceError,
    checked,
    json_lines,
    json_list,
    parse_json,
    read_text_file,
    text_lines,
)
from mmrl.data.fields import RowError, listed, mapping, number, short, text, uid_of
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import video_duration
from mmrl.vision.benchmarks.qvhighlights import WINDOW_SECONDS, saliency_of_windows
from mmrl.vision.benchmarks.time_spans import Span

LONGEST = 1e6  # longest video in seconds; bounds the number of saliency scores
Form = Literal["charades_sta", "activitynet", "qvhighlights", "tvgbench", "jsonl"]
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Query:
    """A query about a video; times are in seconds. `duration` is None if the annotation file has none."""

    uid: str
    video: str
    query: str
    spans: tuple[Span, ...]
    duration: float | None
    saliency: tuple[tuple[float, ...], ...] = ()
    columns: Columns = field(default_factory=dict)
    points: bool = False  # whether spans of length 0 are allowed

    def inside_video(self, media: MediaRoot, trim: bool, unlabelled: bool = False) -> Query:
        """Check the spans, clip them to the video if `trim`, and read a missing duration from the video file.

        Raises `RowError` for a span outside the video, and for a query without spans unless `unlabelled`.
        """
        video = media.locate(self.video)
        duration = video_duration(video) if self.duration is None else self.duration
        if not self.spans and not unlabelled:
            raise RowError("it has no span")
        for start, end in self.spans:
            if not start < end < math.inf and not (self.points and start == end):
                raise RowError(f"the span {start:g} to {end:g} s does not end after it starts")
            if not 0 <= start < duration < math.inf:
                raise RowError(f"the span {start:g} to {end:g} s lies outside its video of {duration:g} s")
        # No error: annotated spans often end slightly after the end of the video.
        spans = tuple((start, min(end, duration) if trim else end) for start, end in self.spans)
        return replace(self, spans=spans, duration=duration)


class Annotations:
    """The rows of an annotation file in a published format.

    Args:
        path: The annotation file.
        form: The format of the file.
        durations: CSV file with the columns `id` and `length` in seconds, for Charades-STA.
        extension: Suffix that is appended to a video id to get its file name.
    """

    def __init__(
        self, path: Path, form: Form = "jsonl", durations: str = "", extension: str = ".mp4"
    ) -> None:
        # Rows of these formats contain file names; rows of the other formats contain video ids.
        named = form in ("jsonl", "tvgbench")
        self.path, self.form, self.extension = path, form, "" if named else extension
        self.lengths: dict[str, float] = {}
        if not durations:
            return
        # `newline=""`, because the module csv handles line ends itself.
        table = csv.DictReader(io.StringIO(read_text_file(Path(durations)), newline=""))
        try:
            for row in table:
                length = float(text(row.get("length"), "length"))
                self.lengths[text(row.get("id"), "id")] = _seconds(length, "length")
        except (csv.Error, ValueError) as error:
            place = f"{durations}:{table.line_num}"
            raise SourceError(f"{place}: wanted columns `id` and `length` in seconds: {error}") from error

    def __iter__(self) -> Iterator[DataRow]:
        return FORMS[self.form][0](self.path)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that `parse` and `vision.grounding` read."""
        return READS[self.form]

    def parse(self, row: DataRow) -> Query:
        """Convert a raw row to a query; raises `RowError` for an invalid row."""
        _, columns_of, spans = FORMS[self.form]
        columns = columns_of(row.columns)
        video, query = text(columns.get("video"), "video"), text(columns.get("query"), "query")
        duration = columns.get("duration", self.lengths.get(video))
        return Query(
            # A row without an id is identified by its video and line number.
            uid_of(columns, f"{video}#{row.place.rpartition(':')[2]}"),
            video + self.extension,
            query,
            spans_of(columns, (spans,)),
            None if duration is None else _seconds(duration, "duration"),
            columns.get("saliency", ()),
            row.all if self.form in ("qvhighlights", "tvgbench", "jsonl") else {},
            self.form == "tvgbench",
        )


def spans_of(columns: Columns, names: tuple[str, ...]) -> tuple[Span, ...]:
    """List the spans of a row in seconds, from the first given column of `names`, or `start` and `end`."""
    name = next((name for name in names if columns.get(name) is not None), "span")
    pairs = [] if name == "span" else listed(columns[name], name)
    ends = columns.get("start"), columns.get("end")
    if not pairs and ends != (None, None):  # a single span may be given in the columns `start` and `end`
        name, pairs = "span", [ends]
    pairs = [listed(pair, name, 2) for pair in pairs]
    return tuple((number(start, f"{name}: start"), number(end, f"{name}: end")) for start, end in pairs)


# ---- the published formats; each parser renames the columns to those of our own format, `jsonl`


def parse_charades(columns: Columns) -> Columns:
    """Parse a line of Charades-STA: `<video> <start> <end>##<sentence>`; durations come from a CSV."""
    left, mark, sentence = columns["line"].partition("##")
    try:
        video, start, end = left.split()
        span = number(float(start), "start"), number(float(end), "end")
    except ValueError:  # includes `RowError`; the new error shows the whole line
        mark = ""
    if not mark or not sentence.strip():
        raise RowError(f"wanted '<video> <start> <end>##<sentence>', got {short(columns['line'])}")
    return {"video": video, "query": sentence, "spans": [span]}


def activitynet_rows(path: Path) -> Iterator[DataRow]:
    """Iterate over the sentences of ActivityNet Captions, or of Charades-STA in the same JSON format.

    The file is `{video: {duration, timestamps, sentences}}`. Other keys become columns of every sentence.
    """
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
            duration = _seconds(columns.get("duration"), "duration")
        except RowError as error:
            yield DataRow(f"{path}: '{video}'", "", fault=str(error))  # one error per video
            continue
        for i, (span, sentence) in enumerate(zip(spans, sentences, strict=True)):
            row = {key: value for key, value in columns.items() if key != "sentences"}
            row |= {"id": f"{video}#{i}", "video": video, "query": sentence, "timestamps": [span]}
            row["duration"] = duration
            yield checked(DataRow(f"{path}: '{video}'[{i}]", "", row))


def parse_qvhighlights(columns: Columns) -> Columns:
    """Parse a line of QVHighlights with the keys qid, query, vid, duration, relevant_windows.

    Optional keys: relevant_clip_ids, indices of two-second windows, and saliency_scores, their ratings.
    """
    duration = _seconds(columns.get("duration"), "duration")
    saliency: tuple[tuple[float, ...], ...] = ()
    if columns.get("saliency_scores") is not None:
        scores = _ratings(columns["saliency_scores"], "saliency_scores")
        count = int(duration / WINDOW_SECONDS)  # rounded down, as in the official evaluation
        for window in listed(columns.get("relevant_clip_ids"), "relevant_clip_ids", len(scores)):
            if type(window) is not int or not 0 <= window < count:
                raise RowError(f"there is no window {short(window)} of two seconds in {duration:g} s")
        saliency = tuple(map(tuple, saliency_of_windows(columns)))
    if columns.get("qid") is None:
        raise RowError("wanted a `qid`")
    return {
        "id": uid_of(columns, "", "qid"),
        "video": text(columns.get("vid"), "vid"),
        "query": columns.get("query"),
        "relevant_windows": listed(columns.get("relevant_windows"), "relevant_windows"),
        "duration": duration,
        "saliency": saliency,
    }


def tvgbench_rows(path: Path) -> Iterator[DataRow]:
    """Iterate over TVGBench (arXiv 2503.13377), a JSON list; ids are the numbers of the rows."""
    for place, row in enumerate(json_list(path)):
        yield row if row.fault else replace(row, columns={**row.columns, "id": place})


def parse_tvgbench(columns: Columns) -> Columns:
    """Parse a row of TVGBench with the keys path, question, answer (`1.5-7.25`) and duration.

    Videos are found by their file names, without the folders in `path`.
    """
    answer = text(columns.get("answer"), "answer")
    start, mark, end = answer.partition("-")
    if not mark:
        raise RowError(f"wanted `answer` as start-end in seconds, got {short(answer)}")
    video = PurePosixPath(text(columns.get("path"), "path")).name
    row = {"id": columns.get("id"), "video": video, "query": columns.get("question")}
    return {**row, "duration": columns.get("duration"), "spans": [(start, end)]}


def parse_jsonl(columns: Columns) -> Columns:
    """Parse a row of our own format: `video`, `query`, and `start` and `end`, or a list `spans`.

    Optional are `duration`, `id`, `saliency` (three ratings for every two-second window) and other columns. A
    row without spans is unlabelled.
    """
    saliency = columns.get("saliency")
    return {**columns, "saliency": () if saliency is None else _ratings(saliency, "saliency")}


# Maps a format to (function that reads its rows, parser of a row, name of the column with the spans).
FORMS: dict[Form, tuple[Callable[[Path], Iterator[DataRow]], Callable[[Columns], Columns], str]] = {
    "charades_sta": (text_lines, parse_charades, "spans"),
    "activitynet": (activitynet_rows, dict, "timestamps"),
    "qvhighlights": (json_lines, parse_qvhighlights, "relevant_windows"),
    "tvgbench": (tvgbench_rows, parse_tvgbench, "spans"),
    "jsonl": (json_lines, parse_jsonl, "spans"),
}
# Maps a format to the names of the columns that its parser reads.
READS: dict[Form, tuple[str, ...]] = {
    "charades_sta": ("line",),
    "activitynet": ("video", "query", "timestamps", "duration"),
    "qvhighlights": tuple(
        ["qid", "query", "vid", "duration", "relevant_windows", "saliency_scores", "relevant_clip_ids"]
    ),
    "tvgbench": ("path", "question", "answer", "duration"),
    "jsonl": ("video", "query", "spans", "start", "end", "duration", "saliency", "reasoning"),
}


def _seconds(value: Any, name: str) -> float:
    if not 0 < number(value, name) <= LONGEST:
        raise RowError(f"wanted more than 0 and at most {LONGEST:g} seconds as `{name}`, got {short(value)}")
    return float(value)


def _ratings(value: Any, name: str) -> tuple[tuple[float, ...], ...]:
    """Check and convert the ratings of windows, three numbers per window; RowError if invalid."""
    windows = [listed(window, name, 3) for window in listed(value, name)]
    return tuple(tuple(number(rating, name) for rating in window) for window in windows)
