"""Time spans in seconds: parsers of answers, and measures of overlap."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.core.answer_text import answer_part, spelled, tagged

Span = tuple[float, float]
Reader = Literal["ours", "time_r1", "videochat_r1", "evaluator"]


@dataclass(frozen=True)
class Moments:
    """Target of a temporal grounding prompt: time spans in a video of `duration` seconds.

    `saliency` (QVHighlights): three scores from 0 to 4 for every two-second window.
    """

    spans: tuple[Span, ...]
    duration: float
    saliency: tuple[tuple[float, ...], ...] = ()


_CLOCK = r"\d{1,3}(?::[0-5]\d){1,2}(?:[.,]\d{1,3})?"  # m:ss or h:mm:ss, with optional decimals of a second
_NUMBER = r"\d++(?:\.\d++)?|\.\d++"
_COMMAS = r"[1-9]\d{0,2}(?:,\d{3}){1,3}(?:\.\d++)?|\d++,\d++"  # thousands separators, or a decimal comma
_UNIT = r"(?P<hours>h(?:ours?|rs?)?)|(?P<minutes>m(?:in(?:ute)?s?)?)|(?P<seconds>s(?:ec(?:ond)?s?)?)"
_TIME = re.compile(
    rf"(?<![\d.:])(?:(?P<clock>{_CLOCK})|(?P<number>{_COMMAS}|{_NUMBER}))(?![.,:]?\d)"
    rf"(?:\s*(?:(?:{_UNIT})(?![^\W\d_])|秒))?",
    re.IGNORECASE,
)
_LISTED = re.compile(rf"[\[(]\s*({_CLOCK}|{_NUMBER}),({_CLOCK}|{_NUMBER})\s*[\])]")  # such as (5,10)
_ENDS = r"[\s,;.]*+(?:and\s+)?[\"'*_]*(?:it\s+)?ends?(?:[ _-]?time)?[\"'*_]*\s*(?:[:=]|at\b|is\b)*"
_BETWEEN = re.compile(
    rf"[>\s]*(?:to|and|until|till|through|;|-{{1,2}}>|[-–—―‒~〜→]|至|到|から|{_ENDS})\s*[\"'*<]*"
    r"(?:\w\s?=\s?)?",
    re.IGNORECASE,
)
_JOINED = re.compile(r"\s*(?:,|and)?\s*", re.IGNORECASE)  # as in "1 minute and 5 seconds"
# Equivalent to the published pattern `(\d+\.?\d*) (to|and) (\d+\.?\d*)`, but not cubic on long digit strings.
_PUBLISHED = r"(?<!\d)(\d++\.?+\d*+) (?:to|and) (\d++\.?+\d*+)"
_OBJECT = re.compile(r"\{[^{}]*\}")  # JSON objects without nested objects


def last_answer(text: str) -> str:
    """Return the content of the last answer block of a text; the empty string without a block."""
    return (tagged(text, "answer") or [""])[-1]


def parse_span(text: str, reader: Reader = "ours") -> Span | None:
    """Parse the time span of an answer; None without a valid span.

    `ours` (our reading): the last span in the last answer block (see `answer_part`). A span is `A to B` (or
    `and`, `until`, any dash), a pair `[A, B]`, or a JSON object with `start_time` and `end_time` (or `start`
    and `end`). Times are seconds with or without `s`, minutes or hours with their unit, or m:ss and h:mm:ss.
    Decimal commas are allowed. In "1 to 2 min" both times are minutes. A span must end after its start.

    The other readers follow published code: they return the last `A to B` or `A and B` with single spaces.
    `time_r1` reads the last answer block and accepts an end before the start, as the reward of Time-R1 (arXiv
    2503.13377). `videochat_r1` rejects an end before the start, as the reward of VideoChat-R1 (arXiv
    2504.06958). `evaluator` reads the whole text, `to` and `and` in lower case, and accepts an end before
    the start, as the evaluation scripts of both papers. Numbers too large for a float are rejected.
    """
    if reader == "ours":
        spans = parse_spans(text)
        return spans[-1] if spans else None
    if reader == "evaluator":
        pairs = re.findall(_PUBLISHED, text)
    else:
        pairs = re.findall(_PUBLISHED, last_answer(text), re.IGNORECASE)
    start, end = map(float, pairs[-1]) if pairs else (math.inf, math.inf)
    backwards = reader == "videochat_r1" and start > end
    return None if backwards or max(start, end) == math.inf else (start, end)


def parse_spans(text: str) -> list[Span]:
    """Parse all time spans of an answer, in the order of the text, with the rules of `parse_span`."""
    searched = spelled(answer_part(text)).replace("**", "")
    spans: list[tuple[int, float | None, float | None]] = []

    def taken(match: re.Match, start: object, end: object) -> str:
        """Record a match's span; return as many `|` as it has characters, to hide it from later patterns."""
        spans.append((match.start(), _seconds(start), _seconds(end)))
        return "|" * len(match[0])

    def read_object(match: re.Match) -> str:
        try:
            fields = json.loads(match[0])
        except (ValueError, RecursionError):
            return match[0]  # the text in braces is not a JSON object
        for first, last in (("start_time", "end_time"), ("start", "end")):
            if first in fields and last in fields:
                return taken(match, fields[first], fields[last])
        return match[0]

    searched = _OBJECT.sub(read_object, searched)
    searched = _LISTED.sub(lambda match: taken(match, match[1], match[2]), searched)
    spans += _pairs(searched, _times(searched))
    # Sort by position in the text, because an answer may mix several notations.
    ordered = [(start, end) for _, start, end in sorted(spans, key=lambda span: span[0])]
    return [(a, b) for a, b in ordered if a is not None and b is not None and 0 <= a < b < math.inf]


@dataclass(frozen=True)
class _Time:
    """A time in a text: its position, its value in seconds, and its unit in seconds (0 without a unit)."""

    start: int
    end: int
    seconds: float
    unit: int


def _times(text: str) -> list[_Time]:
    """List the times of a text; "1 minute and 5 seconds" is one time."""
    times: list[_Time] = []
    for match in _TIME.finditer(text):
        unit = 3600 if match["hours"] else 60 if match["minutes"] else int(match.end() > match.end("number"))
        unit = 1 if match["clock"] else unit
        value = _clock(match["clock"]) if match["clock"] else _float(match["number"]) * (unit or 1)
        time = _Time(match.start(), match.end(), value, unit)
        before = times[-1] if times else None
        smaller = before and before.unit > unit > 0 and value < before.unit and not match["clock"]
        if before and smaller and _JOINED.fullmatch(text, before.end, time.start):
            times[-1] = _Time(before.start, time.end, before.seconds + value, unit)
        else:
            times.append(time)
    return times


def _pairs(text: str, times: Sequence[_Time]) -> list[tuple[int, float | None, float | None]]:
    """Return (position, start, end) of adjacent times joined by a word or dash, or by a comma if `_alone`."""
    pairs: list[tuple[int, float | None, float | None]] = []
    i = 0
    while i + 1 < len(times):
        a, b = times[i], times[i + 1]
        between = text[a.end : b.start]
        listed = between.strip() == "," and _alone(text[: a.start], text[b.end :])
        # A minus sign directly before the first number makes it negative, so it cannot start a span.
        if text[max(0, a.start - 1) : a.start] != "-" and (listed or _BETWEEN.fullmatch(between)):
            start = a.seconds * b.unit if a.unit == 0 and b.unit > 1 else a.seconds
            pairs.append((a.start, start, b.seconds))
            i += 1
        i += 1
    return pairs


def _alone(before: str, after: str) -> bool:
    """Whether a pair of times is the whole text or fills a bracket, given the text before and after it."""
    bracketed = before.rstrip()[-1:] in ("[", "(") and after[:9].lstrip()[:1] in ("]", ")")
    return bracketed or not (before.strip() or after.strip(" .\n"))


def _clock(text: str) -> float:
    """Convert h:mm:ss or m:ss to seconds."""
    seconds = 0.0
    for part in text.replace(",", ".").split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def _float(text: str) -> float:
    """Convert a number with thousands separators or a decimal comma to a float."""
    grouped = re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", text)
    return float(text.replace(",", "" if grouped else "."))


def _seconds(value: object) -> float | None:
    """Convert a number, or a text that contains only a time, to seconds; None for anything else."""
    match value:
        case bool():
            return None
        case int() | float():
            return float(value) if abs(value) < 1e300 else None
        case str():
            times = _times(value.strip())
            whole = len(times) == 1 and times[0].start == 0 and times[0].end == len(value.strip())
            return times[0].seconds if whole else None
    return None


def overlap_and_union(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Compute the lengths of the intersection and of the union of two spans."""
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    return overlap, (a[1] - a[0]) + (b[1] - b[0]) - overlap


def iou(a: Span, b: Span) -> float:
    """Compute the overlap of two spans divided by the length of their hull, in [0, 1].

    For spans that overlap this is the IoU. Equal points give 1; a span that ends before its start gives 0.
    """
    overlap = min(a[1], b[1]) - max(a[0], b[0])  # negative for spans with a gap between them
    hull = max(a[1], b[1]) - min(a[0], b[0])
    if hull <= 0:
        return float(a == b)
    return max(0.0, overlap) / hull


def giou(a: Span, b: Span) -> float:
    """Compute the generalised IoU in (-1, 1]: the IoU minus the fraction of the hull outside both spans."""
    hull = max(a[1], b[1]) - min(a[0], b[0])
    if hull <= 0:
        return float(a == b)
    overlap, union = overlap_and_union(a, b)
    return (overlap / union if union > 0 else 0.0) - (hull - union) / hull  # GIoU, arXiv 1902.09630


def timestamp_aware_iou(answered: Span, target: Span, duration: float) -> float:
    """Multiply the IoU by the accuracy of start and end relative to the video (Time-R1, arXiv 2503.13377).

    Our reading: both accuracy factors are clamped to [0, 1].
    """
    near = [max(0.0, 1 - abs(a - t) / duration) for a, t in zip(answered, target, strict=True)]
    return iou(answered, target) * near[0] * near[1]


def merged(spans: Sequence[Span]) -> list[Span]:
    """Merge spans that overlap or touch."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def set_iou(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Compute the IoU of two sets of spans (VideoChat-R1, arXiv 2504.06958); two empty sets give 1."""
    a, b = merged(a), merged(b)
    shared = sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)
    covered = sum(end - start for start, end in (*a, *b)) - shared  # |A or B| = |A| + |B| - |A and B|
    return shared / covered if covered > 0 else 1.0


def parse_saliency(text: str) -> list[tuple[float, float]]:
    """Parse (second, saliency score) pairs from the last JSON list of pairs in a text; empty without one."""
    searched = answer_part(text)
    # Cut the text after the last closing bracket, so that the search takes linear time.
    ends = [match.end() for match in re.finditer(r"\]\s*\]", searched)]
    searched = searched[: ends[-1]] if ends else ""
    for match in reversed(re.findall(r"\[\s*\[.*?\]\s*\]", searched, re.DOTALL)):
        try:
            pairs = [(float(second), float(rating)) for second, rating in json.loads(match)]
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
        if all(math.isfinite(number) for pair in pairs for number in pair):
            return pairs
    return []
