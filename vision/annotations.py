"""Published annotation files of temporal grounding, read exactly as they are."""

from __future__ import annotations

import csv
import json
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
    lengths = {}
    if durations:
        with durations.open(newline="") as file:
            lengths = {row["id"]: float(row["length"]) for row in csv.DictReader(file)}
    for number, line in _lines(path):
        left, mark, sentence = line.partition("##")
        words = left.split()
        if not mark or len(words) != 3:
            raise AnnotationError(
                f"{path}:{number}: wanted '<video> <start> <end>##<sentence>', got {line!r}"
            )
        video, start, end = words
        yield Row(
            f"{video}#{number}",
            video + extension,
            sentence,
            ((float(start), float(end)),),
            lengths.get(video),
            f"{path}:{number}",
        )


def read_activitynet(path: Path, durations: Path | None, extension: str) -> Iterator[Row]:
    """Read ActivityNet Captions, or Charades-STA as JSON: `{video: {duration, timestamps, sentences}}`; other
    keys are ignored."""
    for video, entry in json.loads(path.read_text()).items():
        try:
            pairs = list(zip(entry["timestamps"], entry["sentences"], strict=True))
            for i, ((start, end), sentence) in enumerate(pairs):
                yield Row(
                    f"{video}#{i}",
                    video + extension,
                    sentence,
                    ((float(start), float(end)),),
                    float(entry["duration"]),
                    f"{path}: {video}[{i}]",
                )
        except (KeyError, ValueError, TypeError) as error:
            raise AnnotationError(
                f"{path}: '{video}' must hold duration, timestamps and as many sentences: {error}"
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
                row["vid"] + extension,
                row["query"],
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
    """Read the plain form: `video`, `query`, and `start` and `end` or a list `spans`; `duration`, `id` and
    others if there are. A row without any of the three is unlabelled."""
    for number, row in _objects(path):
        try:
            pairs = row.get("spans", [])
            if row.keys() & {"start", "end"} and not pairs:
                pairs = [[row["start"], row["end"]]]
            spans = tuple((float(start), float(end)) for start, end in pairs)
            duration = None if row.get("duration") is None else float(row["duration"])
            yield Row(
                str(row.get("id", f"{row['video']}#{number}")),
                row["video"],
                row["query"],
                spans,
                duration,
                f"{path}:{number}",
                columns=row,
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


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            yield number, line


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise AnnotationError(f"{path}:{number}: not a JSON object: {error}") from error
