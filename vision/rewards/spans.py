"""Rewards of temporal grounding; an answer without a readable span is wrong and earns 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.time_spans import (
    Moments,
    Reader,
    Span,
    giou,
    iou,
    parse_span,
    parse_spans,
    set_iou,
    timestamp_aware_iou,
)


@reward
@per_outcome
def temporal_iou(
    prompt: Prompt,
    outcome: Outcome,
    *,
    form: Literal["iou", "giou", "timestamp_aware"] = "iou",
    relax: NonNegativeFloat = 0.0,
    reader: Reader = "ours",
) -> float:
    """Measure the overlap of the answered span with the best of the target spans, in [0, 1].

    Args:
        form: `iou`; `giou`, which also ranks disjoint spans, mapped to [0, 1] by (x + 1) / 2: our reading; or
            `timestamp_aware`, scaled by the accuracy of start and end (Time-R1, arXiv 2503.13377).
        relax: Widens the target by this share of its length on both sides (URPA, arXiv 2508.06317).
        reader: How answers are parsed: `ours`, or as the published code does, `time_r1`, `videochat_r1` or
            `evaluator` (see `parse_span`).
    """
    target: Moments = prompt.target
    span = parse_span(outcome.text or "", reader)
    if span is None:
        return 0.0
    wide = [(start - relax * (end - start), end + relax * (end - start)) for start, end in target.spans]
    if form == "iou":
        return max(iou(span, t) for t in wide)
    if form == "giou":
        return max((giou(span, t) + 1) / 2 for t in wide) if span[0] < span[1] else 0.0
    return max(timestamp_aware_iou(span, t, target.duration) for t in wide)


@reward
@per_outcome
def span_set_iou(prompt: Prompt, outcome: Outcome) -> float:
    """Measure the IoU of all answered spans with all target spans (VideoChat-R1, arXiv 2504.06958)."""
    return set_iou(parse_spans(outcome.text or ""), prompt.target.spans)


def _group_spans(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome]
) -> Iterator[tuple[dict[int, Span | None], list[Span]]]:
    """Yield, for every prompt with two or more valid spans, the span of each outcome by index, and those."""
    groups: dict[str, dict[int, Span | None]] = {}
    for i, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        groups.setdefault(prompt.uid, {})[i] = parse_span(outcome.text or "")
    for members in groups.values():
        spans = [span for span in members.values() if span is not None]
        if len(spans) > 1:
            yield members, spans


@reward
def consensus_span(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
    """Measure the IoU with the mean span of the group, a pseudo-label (URPA, arXiv 2508.06317).

    Answers without a span are left out of the mean and earn 0. A group with fewer than two spans has no
    pseudo-label: None.
    """
    rewards: list[float | None] = [None] * len(outcomes)
    for members, spans in _group_spans(prompts, outcomes):
        start, end = (sum(times) / len(spans) for times in zip(*spans, strict=True))
        for i, span in members.items():
            rewards[i] = 0.0 if span is None else iou(span, (start, end))
    return rewards


@reward
def span_confidence(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    gamma: NonNegativeFloat = 5.0,
    normalise_by: Literal["duration", "none"] = "duration",
) -> list[float | None]:
    """Compute a group's confidence exp(-gamma u) from the spread u of its spans (URPA, arXiv 2508.06317).

    u is the standard deviation of the starts plus that of the ends. A label for `scale_by`; give it weight 0.
    `gamma` and the unit of u are not published: use 5 for u as a fraction of the video (`normalise_by:
    duration`), 0.1 for seconds.
    """
    labels: list[float | None] = [None] * len(outcomes)
    for members, spans in _group_spans(prompts, outcomes):
        # Divided by the count: our reading; URPA does not say.
        spread = 0.0
        for times in zip(*spans, strict=True):
            mean = sum(times) / len(times)
            # Products, because `**` raises where a product of two large floats is infinite.
            spread += (sum((time - mean) * (time - mean) for time in times) / len(times)) ** 0.5
        for i in members:
            unit = prompts[i].target.duration if normalise_by == "duration" else 1.0
            labels[i] = math.exp(-gamma * spread / unit)
    return labels
