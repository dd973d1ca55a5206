"""Time spans in seconds: parsing them from answers, and their overlap measures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.config.reward_adapters import tagged

Span = tuple[float, float]
Reader = Literal["ours", "time_r1", "videochat_r1", "evaluator"]


@dataclass(frozen=True)
class Moments:
    """Target of a grounding prompt: spans of a video of `duration` seconds.

    `saliency` holds, for QVHighlights, three scores of 0 to 4 for every window of two seconds.
    """

    spans: tuple[Span, ...]
    duration: float
    saliency: tuple[tuple[float, ...], ...] = ()


_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_UNIT = r"(?:\s*(?:s|sec|secs|seconds?))?"
# A minus right before a number makes it negative; a full stop after one may end its sentence.
_PAIR = re.compile(
    rf"(?<![\d.-]){_NUMBER}{_UNIT}\s*(?:to|and|-|–)\s*{_NUMBER}{_UNIT}(?!\.?\d)", re.IGNORECASE
)
# `(\d+\.?\d*) (to|and) (\d+\.?\d*)` of the published code, which takes cubic time over many digits.
_PUBLISHED = r"(?<!\d)(\d++\.?+\d*+) (?:to|and) (\d++\.?+\d*+)"
_OBJECT = re.compile(r"\{[^{}]*\}")  # objects that contain no other


def last_answer(text: str, default: str = "") -> str:
    """Return the content of the last answer block of a text, or the default without one."""
    return (tagged(text, "answer") or [default])[-1]


def parse_span(text: str, reader: Reader = "ours") -> Span | None:
    """Parse the time span of an answer; None if there is no valid one.

    It is the last `A to B` (or `and`, `-`, with or without `s`) or JSON object with `start_time` and
    `end_time` in the last answer block, or in the whole text without such a block; a span must end after its
    start. That is our reading.

    The other readers parse as published code does, with one space around `to` or `and`: `time_r1` as the
    reward of Time-R1 (arXiv 2503.13377), in the last answer block only, in any order; `videochat_r1` as that
    of VideoChat-R1 (arXiv 2504.06958), which rejects an end before its start; `evaluator` as the evaluators
    of both, in the whole text, in any order, `to` and `and` in lower case. Numbers too large for a float are
    rejected.
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
    """Parse all time spans of an answer, in order, by the rules of `parse_span`."""
    searched = last_answer(text, default=text)
    spans = [(match.start(), float(match[1]), float(match[2])) for match in _PAIR.finditer(searched)]
    for match in _OBJECT.finditer(searched):
        try:
            fields = json.loads(match[0])
            spans.append((match.start(), float(fields["start_time"]), float(fields["end_time"])))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # braces that hold no span
    # By their place in the text, since both forms may occur in one answer.
    return [(start, end) for _, start, end in sorted(spans) if 0 <= start < end < math.inf]


def overlap_and_union(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Compute the lengths of the intersection and of the union of two spans."""
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    return overlap, (a[1] - a[0]) + (b[1] - b[0]) - overlap


def iou(a: Span, b: Span) -> float:
    """Compute overlap / hull, in [0, 1]; for ordered spans that meet this is the IoU.

    Two equal points give 1, a span with its end before its start 0.
    """
    overlap = min(a[1], b[1]) - max(a[0], b[0])  # negative for spans that do not meet
    hull = max(a[1], b[1]) - min(a[0], b[0])
    if hull <= 0:
        return float(a == b)
    return max(0.0, overlap) / hull


def giou(a: Span, b: Span) -> float:
    """Compute the generalised IoU in (-1, 1]: the IoU minus the uncovered share of the hull."""
    hull = max(a[1], b[1]) - min(a[0], b[0])
    if hull <= 0:
        return float(a == b)
    overlap, union = overlap_and_union(a, b)
    return (overlap / union if union > 0 else 0.0) - (hull - union) / hull  # arXiv 1902.09630


def timestamp_aware_iou(answered: Span, target: Span, duration: float) -> float:
    """Scale the IoU by the accuracy of start and end relative to the video (Time-R1, arXiv 2503.13377).

    Each factor is clamped to [0, 1], which the source does not do: our reading.
    """
    near = [max(0.0, 1 - abs(a - t) / duration) for a, t in zip(answered, target, strict=True)]
    return iou(answered, target) * near[0] * near[1]


def merged(spans: Sequence[Span]) -> list[Span]:
    """Join spans that overlap or touch."""
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
    """Parse (second, score) pairs: the last JSON list of pairs of finite numbers; empty without one."""
    searched = last_answer(text, default=text)
    # After the last end, a search from every beginning would run to the end of the text in vain.
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
