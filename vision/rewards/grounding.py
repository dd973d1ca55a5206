"""Rewards for temporal grounding and highlight detection; an answer without a valid span gets 0."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import OwnAnswer, per_outcome
from mmrl.vision.benchmarks.boxes import decimal
from mmrl.vision.benchmarks.qvhighlights import (
    LEVELS,
    MAX_WINDOWS,
    THRESHOLDS,
    WINDOW_SECONDS,
    detection_ap,
    highlight_metrics,
)
from mmrl.vision.benchmarks.time_spans import (
    Moments,
    Reader,
    Span,
    giou,
    iou,
    parse_saliency,
    parse_span,
    parse_spans,
    set_iou,
    timestamp_aware_iou,
)

Level = Literal["Fair", "Good", "VeryGood"]
Overlap = Literal["iou", "giou", "timestamp_aware"]


def _written(span: Span) -> str:
    return f"{decimal(span[0])} to {decimal(span[1])}"


def _own_span(prompt: Prompt, *, form: Overlap, relax: float) -> OwnAnswer:
    """Format each target span as an answer; with `relax`, the best possible reward is below 1."""
    spans = prompt.target.spans
    full = min(_overlap(span, prompt.target, form, relax) for span in spans)
    return OwnAnswer(tuple(f"<answer>{_written(span)}</answer>" for span in spans), full or 1.0)


@reward(own_answer=_own_span)
@per_outcome
def temporal_iou(
    prompt: Prompt,
    outcome: Outcome,
    *,
    form: Overlap = "iou",
    relax: NonNegativeFloat = 0.0,
    reader: Reader = "ours",
) -> float:
    """Return the largest overlap of the answered span with a target span, in [0, 1].

    Args:
        form: Measure of overlap. `iou`: the IoU. `giou`: the generalised IoU, which also ranks disjoint
            spans, mapped to [0, 1] by (x + 1) / 2 (our reading). `timestamp_aware`: the IoU, scaled by the
            accuracy of start and end (Time-R1, arXiv 2503.13377).
        relax: Extends the target on both sides by this fraction of its length (URPA, arXiv 2508.06317).
        reader: Parser of answers. `ours`: our parser. `time_r1`, `videochat_r1` or `evaluator`: as in
            published code (see `parse_span`).
    """
    span = parse_span(outcome.text or "", reader)
    return 0.0 if span is None else _overlap(span, prompt.target, form, relax)


def _overlap(span: Span, target: Moments, form: Overlap, relax: float) -> float:
    """Return the largest overlap of a span with a target span, in [0, 1]."""
    wide = [(start - relax * (end - start), end + relax * (end - start)) for start, end in target.spans]
    if form == "iou":
        return max(iou(span, t) for t in wide)
    if form == "giou":
        # A span that ends before its start has a negative length, so its reward is 0.
        return max((giou(span, t) + 1) / 2 for t in wide) if span[0] < span[1] else 0.0
    return max(timestamp_aware_iou(span, t, target.duration) for t in wide)


def _own_spans(prompt: Prompt) -> OwnAnswer:
    return OwnAnswer(("; ".join(map(_written, prompt.target.spans)),))


@reward(own_answer=_own_spans)
@per_outcome
def span_set_iou(prompt: Prompt, outcome: Outcome) -> float:
    """Return the IoU of all answered spans with all target spans (VideoChat-R1, arXiv 2504.06958)."""
    return set_iou(parse_spans(outcome.text or ""), prompt.target.spans)


def _group_spans(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome]
) -> Iterator[tuple[dict[int, Span | None], list[Span]]]:
    """Yield (spans by outcome index, valid spans) for every prompt with at least two valid spans."""
    groups: dict[str, dict[int, Span | None]] = {}
    for i, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        groups.setdefault(prompt.uid, {})[i] = parse_span(outcome.text or "")
    for members in groups.values():
        spans = [span for span in members.values() if span is not None]
        if len(spans) > 1:
            yield members, spans


@reward
def consensus_span(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
    """Return each span's IoU with its group's mean span, a pseudo-label (URPA, arXiv 2508.06317).

    Answers without a span get 0 and do not enter the mean. In a group with fewer than two spans, all
    rewards are None.
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

    u is the standard deviation of the starts plus the standard deviation of the ends. It is meant as a label:
    set `weight: 0` and name it in the option `of` of `scale_by`. The paper gives neither `gamma` nor the unit
    of u. Use `gamma: 5` with `normalise_by: duration`, and 0.1 for seconds (`normalise_by: none`).
    """
    labels: list[float | None] = [None] * len(outcomes)
    for members, spans in _group_spans(prompts, outcomes):
        # Use the population variance, which divides by the count (our reading).
        spread = 0.0
        for times in zip(*spans, strict=True):
            mean = sum(times) / len(times)
            # Square by multiplication: `**` raises OverflowError where `*` returns infinity.
            spread += (sum((time - mean) * (time - mean) for time in times) / len(times)) ** 0.5
        for i in members:
            unit = prompts[i].target.duration if normalise_by == "duration" else 1.0
            labels[i] = math.exp(-gamma * spread / unit)
    return labels


# ---- moment retrieval and highlight detection (QVHighlights, arXiv 2107.09609)


def _own_windows(prompt: Prompt, *, threshold: float | None) -> OwnAnswer:
    """Format the target spans as an answer; with over `MAX_WINDOWS` spans, the best reward is below 1."""
    spans = prompt.target.spans
    return OwnAnswer(_own_spans(prompt).texts, _window_ap(spans, spans, threshold) or 1.0)


@reward(own_answer=_own_windows)
@per_outcome
def window_ap(prompt: Prompt, outcome: Outcome, *, threshold: Probability | None = None) -> float:
    """Compute the average precision of the answered spans, ranked in the order of the answer.

    Args:
        threshold: Smallest IoU of a match; null: the mean over the thresholds 0.5 to 0.95.
    """
    return _window_ap(parse_spans(outcome.text or ""), prompt.target.spans, threshold)


def _window_ap(spans: Sequence[Span], targets: Sequence[Span], threshold: float | None) -> float:
    # Score spans by their negative rank: the first span is the best.
    windows = [(start, end, -float(rank)) for rank, (start, end) in enumerate(spans[:MAX_WINDOWS])]
    thresholds = THRESHOLDS if threshold is None else (threshold,)
    return sum(detection_ap(targets, windows, t) for t in thresholds) / len(thresholds)


def _rated_windows(outcome: Outcome) -> dict[int, float]:
    """Parse the saliency scores of an answer; the result maps indices of two-second windows to scores."""
    return {int(second // WINDOW_SECONDS): rating for second, rating in parse_saliency(outcome.text or "")}


def _own_saliency(prompt: Prompt) -> OwnAnswer | None:
    rated = [[WINDOW_SECONDS * i, rating] for i, rating in _rated(prompt.target).items()]
    return OwnAnswer((json.dumps(rated),)) if rated else None


def _own_highlights(prompt: Prompt, *, level: Level, of: int) -> OwnAnswer | None:
    """Format the annotators' mean saliency as an answer; if they differ, the best reward may be below 1."""
    own = _own_saliency(prompt)
    full = _highlights(prompt, _rated(prompt.target), level)[of]
    return OwnAnswer(own.texts, full) if own and full else None


def _own_highlight_ap(prompt: Prompt, *, level: Level) -> OwnAnswer | None:
    return _own_highlights(prompt, level=level, of=0)


def _own_highlight_hit(prompt: Prompt, *, level: Level) -> OwnAnswer | None:
    return _own_highlights(prompt, level=level, of=1)


@reward(own_answer=_own_highlight_ap)
@per_outcome
def highlight_ap(prompt: Prompt, outcome: Outcome, *, level: Level = "VeryGood") -> float | None:
    """Compute the average precision of the saliency scores in an answer.

    Windows rated `level` or higher are positives. None for a prompt without ratings."""
    return _highlights(prompt, _rated_windows(outcome), level)[0]


@reward(own_answer=_own_highlight_hit)
@per_outcome
def highlight_hit(prompt: Prompt, outcome: Outcome, *, level: Level = "VeryGood") -> float | None:
    """Reward with 1 if an annotator rates the answer's top window `level` or higher (HIT@1), else 0.

    An answer without saliency scores gets 0. The reward is None without saliency annotation.
    """
    return _highlights(prompt, _rated_windows(outcome), level)[1]


def _rated(target: Moments) -> dict[int, float]:
    """Map the index of each window with an annotated score above 0 to the mean score of the annotators."""
    return {i: sum(rated) / len(rated) for i, rated in enumerate(target.saliency) if any(rated)}


def _highlights(
    prompt: Prompt, rated: Mapping[int, float], level: Level
) -> tuple[float | None, float | None]:
    """Compute (AP, HIT@1) of saliency scores. `rated` maps window indices to scores; missing ones are 0."""
    truth = prompt.target.saliency
    if not truth:
        return None, None
    scores = [rated.get(i, 0.0) for i in range(len(truth))]
    ap, hit = highlight_metrics(truth, scores, LEVELS[level])
    return ap, hit if any(scores) else 0.0


@reward(own_answer=_own_saliency)
@per_outcome
def saliency(prompt: Prompt, outcome: Outcome) -> float | None:
    """Reward highlight answers with 0.6 F2 + 0.4 / (1 + WMSE) (TempSamp-R1, arXiv 2509.18056).

    F2 weighs the recall of annotated windows more than precision. Times match if they are in the same
    two-second window. WMSE is the mean squared error of the scores of matched windows, weighted by the
    squared annotated score (our reading). An answer without a match gets 0.
    """
    if not prompt.target.saliency:
        return None
    truth = _rated(prompt.target)
    answered = _rated_windows(outcome)
    matched = truth.keys() & answered.keys()
    if not matched:
        return 0.0
    precision, recall = len(matched) / len(answered), len(matched) / len(truth)
    f2 = 5 * precision * recall / (4 * precision + recall)  # F_b = (1 + b^2) P R / (b^2 P + R) with b = 2
    weight = sum(truth[i] ** 2 for i in matched)
    # Square by multiplication: `**` raises OverflowError where `*` returns infinity.
    errors = [truth[i] * (answered[i] - truth[i]) for i in matched]
    error = sum(x * x for x in errors)
    return 0.6 * f2 + 0.4 / (1 + error / weight)
