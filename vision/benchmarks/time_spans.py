"""Spans of time: reading them out of answers, and measuring how well they agree. All times are seconds."""

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
    """What a grounding prompt asks for: spans of a clip that lasts `duration` seconds.

    `saliency` holds, for QVHighlights, three scores of 0 to 4 for every clip of two seconds.
    """

    spans: tuple[Span, ...]
    duration: float
    saliency: tuple[tuple[float, ...], ...] = ()


_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_UNIT = r"(?:\s*(?:s|sec|secs|seconds?))?"
# A minus right in front of a number makes it negative; a full stop behind one may end its sentence.
_PAIR = re.compile(
    rf"(?<![\d.-]){_NUMBER}{_UNIT}\s*(?:to|and|-|–)\s*{_NUMBER}{_UNIT}(?!\.?\d)", re.IGNORECASE
)
# `(\d+\.?\d*) (to|and) (\d+\.?\d*)` of the published code, which takes cubic time over many digits.
_PUBLISHED = r"(?<!\d)(\d++\.?+\d*+) (?:to|and) (\d++\.?+\d*+)"
_OBJECT = re.compile(r"\{[^{}]*\}")


def last_answer(text: str) -> str | None:
    """Cut the last answer block out of a text; None where there is none."""
    blocks = tagged(text, "answer")
    return blocks[-1] if blocks else None


def parse_span(text: str, reader: Reader = "ours") -> Span | None:
    """Read the span of an answer; None where there is none.

    It is the last `A to B` (or `and`, `-`, with or without `s`) or JSON object with `start_time` and
    `end_time` in the last answer block, or in the whole text without such a block; an end that is not after
    its start is no span. That is our reading.

    The other readers are those of published code, with one space around `to` or `and`: `time_r1` reads as the
    reward of Time-R1 (arXiv 2503.13377) does, in the last answer block only, in any order; `videochat_r1` as
    that of VideoChat-R1 (arXiv 2504.06958), for which an end before its start is no span; `evaluator` as the
    evaluators of both, in the whole text, in any order, `to` and `and` in lower case. Numbers too large for a
    float are no span.
    """
    if reader == "ours":
        spans = parse_spans(text)
        return spans[-1] if spans else None
    case = re.NOFLAG if reader == "evaluator" else re.IGNORECASE
    found = re.findall(_PUBLISHED, text if reader == "evaluator" else last_answer(text) or "", case)
    span = (float(found[-1][0]), float(found[-1][1])) if found else (math.inf, math.inf)
    backwards = reader == "videochat_r1" and span[0] > span[1]
    return None if backwards or max(span) == math.inf else span


def parse_spans(text: str) -> list[Span]:
    """Read all spans of an answer, in order, as `parse_span` does one."""
    block = last_answer(text)
    searched = text if block is None else block
    found = [(match.start(), float(match[1]), float(match[2])) for match in _PAIR.finditer(searched)]
    for match in _OBJECT.finditer(searched):
        span = _from_object(match[0])
        found += [(match.start(), *span)] if span else []
    return [(start, end) for _, start, end in sorted(found) if 0 <= start < end < math.inf]


def _from_object(text: str) -> Span | None:
    try:
        read = json.loads(text)
        return float(read["start_time"]), float(read["end_time"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def iou(a: Span, b: Span) -> float:
    """Divide overlap by hull, in [0, 1]. For ordered spans this is the IoU; two equal points give 1, a span
    out of order 0."""
    overlap = min(a[1], b[1]) - max(a[0], b[0])
    hull = max(a[1], b[1]) - min(a[0], b[0])
    if hull <= 0:
        return float(a == b)
    return max(0.0, overlap) / hull


def giou(a: Span, b: Span) -> float:
    """Subtract from the IoU the share of the hull that neither covers, in (-1, 1]."""
    hull = max(a[1], b[1]) - min(a[0], b[0])
    if hull <= 0:
        return float(a == b)
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = (a[1] - a[0]) + (b[1] - b[0]) - overlap
    return (overlap / union if union > 0 else 0.0) - (hull - union) / hull


def timestamp_aware_iou(answered: Span, target: Span, duration: float) -> float:
    """Scale the IoU by how near start and end are, as shares of the clip (Time-R1, arXiv 2503.13377).

    Each factor is held in [0, 1], which the source does not do: our reading.
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
    """Divide what two sets of spans share by what they cover together (VideoChat-R1, arXiv 2504.06958); two
    empty sets give 1."""
    a, b = merged(a), merged(b)
    shared = sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)
    covered = sum(end - start for start, end in (*a, *b)) - shared
    return shared / covered if covered > 0 else 1.0


def parse_saliency(text: str) -> list[tuple[float, float]]:
    """Read (second, score) pairs: the last JSON list of pairs of finite numbers in the answer; an answer
    without one is empty."""
    block = last_answer(text)
    searched = text if block is None else block
    # Behind the last end every beginning would be searched to the end of the text in vain.
    ends = [found.end() for found in re.finditer(r"\]\s*\]", searched)]
    searched = searched[: ends[-1]] if ends else ""
    for found in reversed(re.findall(r"\[\s*\[.*?\]\s*\]", searched, re.DOTALL)):
        try:
            pairs = [(float(second), float(rating)) for second, rating in json.loads(found)]
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
        if all(math.isfinite(number) for pair in pairs for number in pair):
            return pairs
    return []
