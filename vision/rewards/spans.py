"""Rewards of temporal grounding. An answer that cannot be read earns 0; it is wrong, not missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.time_spans import (
    Moments,
    Reader,
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
    """Measure how the answered span overlaps the target span, in [0, 1]; of several targets the best counts.

    `giou` also tells disjoint spans apart, mapped to [0, 1] by (x + 1) / 2: our reading. `timestamp_aware`
    scales by how near start and end are (Time-R1, arXiv 2503.13377). `relax` widens the target by that share
    of its length on both sides (URPA, arXiv 2508.06317). `reader` names how answers are read: `ours`, or as
    published code does, `time_r1`, `videochat_r1` or `evaluator` (see `parse_span`).
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
    """Measure how all answered spans together overlap all target spans together (VideoChat-R1, arXiv
    2504.06958), in [0, 1]."""
    return set_iou(parse_spans(outcome.text or ""), prompt.target.spans)


def _by_prompt(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> dict[str, list[int]]:
    """List the outcomes of every prompt that hold a span."""
    places: dict[str, list[int]] = {}
    for i, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        places.setdefault(prompt.uid, [])
        if parse_span(outcome.text or "") is not None:
            places[prompt.uid].append(i)
    return places


def _spread(values: Sequence[float]) -> float:
    """Measure the deviation of a whole group: it divides by the count (our reading; URPA does not say)."""
    mean = sum(values) / len(values)
    # Products, because `**` raises where a product of two large floats is infinite.
    return (sum((value - mean) * (value - mean) for value in values) / len(values)) ** 0.5


@reward
def consensus_span(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
    """Measure the IoU with the mean span of the group: a pseudo-label where there is no other (URPA, arXiv
    2508.06317).

    Answers without a span are left out of the mean and earn 0. A group with fewer than two spans has no
    pseudo-label: None.
    """
    spans = [parse_span(outcome.text or "") for outcome in outcomes]
    rewards: list[float | None] = [None] * len(outcomes)
    for uid, places in _by_prompt(prompts, outcomes).items():
        if len(places) < 2:
            continue
        mean = tuple(sum(spans[i][side] for i in places) / len(places) for side in (0, 1))
        for i, prompt in enumerate(prompts):
            if prompt.uid == uid:
                rewards[i] = 0.0 if spans[i] is None else iou(spans[i], mean)
    return rewards


@reward
def span_confidence(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    gamma: NonNegativeFloat = 5.0,
    normalise_by: Literal["duration", "none"] = "duration",
) -> list[float | None]:
    """Tell how sure a group is: exp(-gamma u), u the deviation of its starts plus that of its ends (URPA,
    arXiv 2508.06317).

    A label for `scale_by`; give it weight 0. `gamma` and the unit of u are not published: 5 for shares of the
    clip, 0.1 for seconds.
    """

    spans = [parse_span(outcome.text or "") for outcome in outcomes]
    labels: list[float | None] = [None] * len(outcomes)
    for uid, places in _by_prompt(prompts, outcomes).items():
        if len(places) < 2:
            continue
        doubt = sum(_spread([spans[i][side] for i in places]) for side in (0, 1))
        for i, prompt in enumerate(prompts):
            if prompt.uid == uid:
                unit = prompt.target.duration if normalise_by == "duration" else 1.0
                labels[i] = math.exp(-gamma * doubt / unit)
    return labels
