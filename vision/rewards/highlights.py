"""Rewards of moment retrieval and highlight detection (QVHighlights, arXiv 2107.09609)."""

from __future__ import annotations

from typing import Literal

from mmrl.config.ranges import Probability
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.qvhighlights import (
    LEVELS,
    MAX_WINDOWS,
    THRESHOLDS,
    WINDOW_SECONDS,
    detection_ap,
    highlight_metrics,
)
from mmrl.vision.benchmarks.time_spans import parse_saliency, parse_spans

Level = Literal["Fair", "Good", "VeryGood"]


@reward
@per_outcome
def window_ap(prompt: Prompt, outcome: Outcome, *, threshold: Probability | None = None) -> float:
    """Compute the average precision of the answered spans, ranked in the order of the answer.

    `threshold` is the IoU of a match; by default the mean over 0.5 to 0.95 is taken.
    """
    spans = parse_spans(outcome.text or "")[:MAX_WINDOWS]
    windows = [(start, end, -float(rank)) for rank, (start, end) in enumerate(spans)]
    thresholds = THRESHOLDS if threshold is None else (threshold,)
    return sum(detection_ap(prompt.target.spans, windows, t) for t in thresholds) / len(thresholds)


def _rated_windows(outcome: Outcome) -> dict[int, float]:
    """Map windows of two seconds to their answered scores."""
    return {int(second // WINDOW_SECONDS): rating for second, rating in parse_saliency(outcome.text or "")}


@reward
@per_outcome
def highlight_ap(prompt: Prompt, outcome: Outcome, *, level: Level = "VeryGood") -> float | None:
    """Compute the average precision of answered saliency at a level; None without saliency annotation."""
    return _highlights(prompt, outcome, level)[0]


@reward
@per_outcome
def highlight_hit(prompt: Prompt, outcome: Outcome, *, level: Level = "VeryGood") -> float | None:
    """Reward with 1 if the window rated highest is a highlight for any annotator (HIT@1), else 0.

    An answer without ratings earns 0; None without saliency annotation.
    """
    return _highlights(prompt, outcome, level)[1]


def _highlights(prompt: Prompt, outcome: Outcome, level: Level) -> tuple[float | None, float | None]:
    """Compute (AP, hit at 1) of an answer, in which windows without a rating score 0."""
    truth = prompt.target.saliency
    if not truth:
        return None, None
    rated = _rated_windows(outcome)
    scores = [rated.get(i, 0.0) for i in range(len(truth))]
    ap, hit = highlight_metrics(truth, scores, LEVELS[level])
    return ap, hit if any(scores) else 0.0


@reward
@per_outcome
def saliency(prompt: Prompt, outcome: Outcome) -> float | None:
    """Reward highlight answers with 0.6 F2 + 0.4 / (1 + WMSE) (TempSamp-R1, arXiv 2509.18056).

    F2 weighs the recall of annotated windows over precision; times match on the grid of two seconds, and WMSE
    is the squared error of the scores of matched windows, weighted by the squared annotated score and divided
    by the sum of the weights: our reading. An answer without a match earns 0.
    """
    if not prompt.target.saliency:
        return None
    truth = {i: sum(rated) / len(rated) for i, rated in enumerate(prompt.target.saliency) if any(rated)}
    answered = _rated_windows(outcome)
    matched = truth.keys() & answered.keys()
    if not matched:
        return 0.0
    precision, recall = len(matched) / len(answered), len(matched) / len(truth)
    f2 = 5 * precision * recall / (4 * precision + recall)
    weight = sum(truth[i] ** 2 for i in matched)
    # Products, because `**` raises where a product of two large floats is infinite.
    errors = [truth[i] * (answered[i] - truth[i]) for i in matched]
    error = sum(x * x for x in errors)
    return 0.6 * f2 + 0.4 / (1 + error / weight)
