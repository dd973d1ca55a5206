"""Rewards of moment retrieval with several windows, and of highlight detection (QVHighlights, arXiv
2107.09609)."""

from __future__ import annotations

from typing import Literal

from mmrl.config.ranges import Probability
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.qvhighlights import (
    CLIP_SECONDS,
    LEVELS,
    MAX_WINDOWS,
    THRESHOLDS,
    detection_ap,
    highlight_metrics,
)
from mmrl.vision.benchmarks.time_spans import parse_saliency, parse_spans


@reward
@per_outcome
def window_ap(prompt: Prompt, outcome: Outcome, *, threshold: Probability | None = None) -> float:
    """Compute the average precision of the answered spans, the first ones ranked highest; averaged over 0.5
    to 0.95 by default."""
    spans = parse_spans(outcome.text or "")[:MAX_WINDOWS]
    windows = [(start, end, -float(rank)) for rank, (start, end) in enumerate(spans)]
    bars = THRESHOLDS if threshold is None else (threshold,)
    return sum(detection_ap(prompt.target.spans, windows, bar) for bar in bars) / len(bars)


def _clip_scores(prompt: Prompt, outcome: Outcome) -> list[float]:
    """Lay answered (second, score) pairs over the clips of two seconds; clips that were not named score 0."""
    scores = [0.0] * len(prompt.target.saliency)
    for second, rating in parse_saliency(outcome.text or ""):
        clip = int(second // CLIP_SECONDS)
        if 0 <= clip < len(scores):
            scores[clip] = rating
    return scores


@reward
@per_outcome
def highlight_ap(
    prompt: Prompt, outcome: Outcome, *, level: Literal["Fair", "Good", "VeryGood"] = "VeryGood"
) -> float | None:
    """Compute the average precision of answered saliency at a level; None where the clip has no saliency
    annotation."""
    if not prompt.target.saliency:
        return None
    return highlight_metrics(prompt.target.saliency, _clip_scores(prompt, outcome), LEVELS[level])[0]


@reward
@per_outcome
def highlight_hit(
    prompt: Prompt, outcome: Outcome, *, level: Literal["Fair", "Good", "VeryGood"] = "VeryGood"
) -> float | None:
    """Give 1 if the clip rated highest is a highlight for any annotator (HIT@1); an answer without ratings
    misses."""
    if not prompt.target.saliency:
        return None
    scores = _clip_scores(prompt, outcome)
    return highlight_metrics(prompt.target.saliency, scores if any(scores) else [], LEVELS[level])[1]


@reward
@per_outcome
def saliency(prompt: Prompt, outcome: Outcome) -> float | None:
    """Reward highlight answers with 0.6 F2 + 0.4 / (1 + WMSE) (TempSamp-R1, arXiv 2509.18056).

    F2 weighs the recall of annotated clips over precision; times match on the grid of two seconds, and WMSE
    is the squared error of the scores of matched clips, weighed by the squared annotated score and divided by
    the sum of the weights: our reading. An answer without a match earns 0.
    """
    if not prompt.target.saliency:
        return None
    truth = {i: sum(rated) / len(rated) for i, rated in enumerate(prompt.target.saliency) if any(rated)}
    answered = {int(second // CLIP_SECONDS): rating for second, rating in parse_saliency(outcome.text or "")}
    matched = truth.keys() & answered.keys()
    if not matched:
        return 0.0
    precision, recall = len(matched) / len(answered), len(matched) / len(truth)
    f2 = 5 * precision * recall / (4 * precision + recall)
    weight = sum(truth[i] ** 2 for i in matched)
    # Products, because `**` raises where a product of two large floats is infinite.
    error = sum(
        (truth[i] * (answered[i] - truth[i])) * (truth[i] * (answered[i] - truth[i])) for i in matched
    )
    return 0.6 * f2 + 0.4 / (1 + error / weight)
