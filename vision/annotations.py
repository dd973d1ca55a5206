"""Published annotation files of temporal grounding, read exactly as they are."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.vision.highlights import clip_scores
from mmrl.vision.spans import Span


@dataclass(frozen=True)
class Row:
    """One query about one video. `duration` is None where the file does not tell; `place` is where in the
    file it stands."""

    uid: str
    video: str
    query: str
    spans: tuple[Span, ...]
    duration: float | None
    place: str
    saliency: tuple[tuple[float, ...], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


class AnnotationError(ValueError):
    """A line that does not have the form of its file."""


def read_charades(path: Path, durations: Path | None, extension: str) -> Iterator[Row]:
    """Read Charades-STA: `<video> <start> <end>##<sentence>` a line; durations come from the columns `id` and
    `length` of a CSV."""
    lengths = _read_lengths(durations) if durations else {}
    for number, line in _lines(path):
        left, mark, sentence = line.partition("##")
        try:
            video, start, end = left.split()
            span = float(start), float(end)
        except ValueError:
            mark = ""
        if not mark or not sentence.strip():
            raise AnnotationError(
                f"{path}:{number}: wanted '<video> <start> <end>##<sentence>', got {line!r}"
            )
        yield Row(
            f"{video}#{number}", video + extension, sentence, (span,), lengths.get(video), f"{path}:{number}"
        )


def _read_lengths(path: Path) -> dict[str, float]:
    """Read the columns `id` and `length` of a CSV."""
    table = csv.DictReader(io.StringIO(_text(path), newline=""))
    lengths = {}
    for row in table:
        try:
            lengths[row["id"]] = float(row["length"])
        except (KeyError, ValueError, TypeError) as error:
            raise AnnotationError(
                f"{path}:{table.line_num}: wanted columns `id` and `length` in seconds: "
                f"{type(error).__name__}: {error}"
            ) from error
    return lengths


def read_activitynet(path: Path, durations: Path | None, extension: str) -> Iterator[Row]:
    """Read ActivityNet Captions, or Charades-STA as JSON: `{video: {duration, timestamps, sentences}}`; other
    keys are ignored."""
    for video, entry in _object(_text(path), str(path)).items():
        try:
            pairs = list(zip(entry["timestamps"], entry["sentences"], strict=True))
            for i, ((start, end), sentence) in enumerate(pairs):
                yield Row(
                    f"{video}#{i}",
                    video + extension,
                    _word(sentence),
                    ((float(start), float(end)),),
                    float(entry["duration"]),
                    f"{path}: {video}[{i}]",
                )
        except (KeyError, ValueError, TypeError) as error:
            raise AnnotationError(
                f"{path}: '{video}' must hold duration, timestamps and as many sentences: "
                f"{type(error).__name__}: {error}"
            ) from error


def read_qvhighlights(path: Path, durations: Path | None, extension: str) -> Iterator[Row]:
    """Read QVHighlights: one object a line with qid, query, vid, duration, relevant_windows, and saliency of
    clips of 2 s."""
    for number, row in _objects(path):
        try:
            spans = tuple((float(start), float(end)) for start, end in row["relevant_windows"])
            saliency = tuple(map(tuple, clip_scores(row))) if "saliency_scores" in row else ()
            yield Row(
                str(row["qid"]),
                _word(row["vid"]) + extension,
                _word(row["query"]),
                spans,
                float(row["duration"]),
                f"{path}:{number}",
                saliency,
                row,
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise AnnotationError(
                f"{path}:{number}: not a row of QVHighlights: {type(error).__name__}: {error}"
            ) from error


def read_jsonl(path: Path, durations: Path | None, extension: str) -> Iterator[Row]:
    """Read the plain form: `video`, `query`, and `start` and `end` or a list `spans`; `duration`, `id`,
    `saliency` (the ratings of every clip of 2 s) and others if there are. A row without any of the three is
    unlabelled."""
    for number, row in _objects(path):
        try:
            pairs = row.get("spans", [])
            if row.keys() & {"start", "end"} and not pairs:
                pairs = [[row["start"], row["end"]]]
            spans = tuple((float(start), float(end)) for start, end in pairs)
            duration = None if row.get("duration") is None else float(row["duration"])
            saliency = tuple(map(tuple, row.get("saliency", ())))
            yield Row(
                str(row.get("id", f"{row['video']}#{number}")),
                _word(row["video"]),
                _word(row["query"]),
                spans,
                duration,
                f"{path}:{number}",
                saliency,
                row,
            )
        except (KeyError, ValueError, TypeError) as error:
            raise AnnotationError(
                f"{path}:{number}: wanted video, query, start, end (or spans): "
                f"{type(error).__name__}: {error}"
            ) from error


READERS: dict[str, Callable[[Path, Path | None, str], Iterator[Row]]] = {
    "charades_sta": read_charades,
    "activitynet": read_activitynet,
    "qvhighlights": read_qvhighlights,
    "jsonl": read_jsonl,
}


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


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise AnnotationError(f"{path}:{number}: not UTF-8: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # Not `splitlines`, which also cuts at separators that may stand inside a JSON string.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _object(text: str, place: str) -> dict[str, Any]:
    """Read one JSON object."""
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise AnnotationError(f"{place}: not a JSON object: {error}") from error
    if not isinstance(read, dict):
        raise AnnotationError(f"{place}: not a JSON object, but {text[:80]!r}")
    return read


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        yield number, _object(line, f"{path}:{number}")


def _word(value: Any) -> str:
    """Let a text through, and nothing else."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value
