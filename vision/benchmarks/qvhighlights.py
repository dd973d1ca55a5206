"""QVHighlights (arXiv 2107.09609): metrics of moment retrieval and highlight detection for one query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.vision.benchmarks.time_spans import Span, overlap_and_union

THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))  # 0.5, 0.55, ..., 0.95
LEVELS = {"Fair": 2, "Good": 3, "VeryGood": 4}  # least rating of a highlight, of 0 to 4
MAX_WINDOWS = 10  # most windows of an answer in the official evaluation
WINDOW_SECONDS = 2  # length of the windows with saliency ratings; the data set calls them clips


def true_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Compute the IoU of two windows; disjoint ones give 0."""
    overlap, union = overlap_and_union(a, b)
    return overlap / union if union > 0 else 0.0


def detection_ap(targets: Sequence[Span], windows: Sequence[Sequence[float]], threshold: float) -> float:
    """Compute the average precision of (start, end, score) windows at one IoU threshold.

    Windows are matched in order of falling score; each takes the unmatched target of highest IoU that
    reaches the threshold. Precision is interpolated over recall (VOC 2011). Without windows it is 0.
    """
    taken: set[int] = set()
    hits = []
    for window in sorted(windows, key=lambda w: -w[2]):
        near = sorted(((true_iou(window, target), i) for i, target in enumerate(targets)), reverse=True)
        # A target is found once: a second window on it is a false positive.
        match = next((i for overlap, i in near if overlap >= threshold and i not in taken), None)
        hits.append(match is not None)
        taken |= {match} - {None}
    true, points = 0, []
    for rank, hit in enumerate(hits, 1):
        true += hit
        points.append((true / len(targets), true / rank))
    # From the end backwards, interpolated precision is a running maximum; each step of recall weighs it.
    area, best, right = 0.0, 0.0, 1.0
    for recall, precision in reversed(points):
        area += (right - recall) * best
        best, right = max(best, precision), recall
    return area + right * best


def saliency_ap(truth: Sequence[int], scores: Sequence[float]) -> float:
    """Compute the average precision of window scores.

    It is the mean of interpolated precision over the rises of recall. All-negative truth gives 0,
    all-positive 1. Missing scores count as 0, surplus ones are ignored.
    """
    scores = [*scores[: len(truth)], *[0.0] * (len(truth) - len(scores))]
    if len(set(truth)) == 1:
        return float(truth[0])
    positives, points = sum(truth), []
    for threshold in sorted(set(scores), reverse=True):  # windows of equal score enter together
        chosen = [t for t, score in zip(truth, scores, strict=True) if score >= threshold]
        points.append((sum(chosen) / positives, sum(chosen) / len(chosen)))
    best, rises = 0.0, []
    for i, (recall, precision) in reversed([*enumerate(points)]):
        best = max(best, precision)
        if recall > (points[i - 1][0] if i else 0.0):
            rises.append(best)
    return sum(rises) / len(rises)


def saliency_of_windows(row: Mapping[str, Any]) -> list[list[float]]:
    """List the saliency of every two-second window of a row's video: three scores, 0 if unrated."""
    windows = [[0.0, 0.0, 0.0] for _ in range(int(row["duration"] / WINDOW_SECONDS))]
    for i, (first, second, third) in zip(row["relevant_clip_ids"], row["saliency_scores"], strict=True):
        if not 0 <= i < len(windows):
            raise IndexError(f"there is no window {i} of two seconds in {row['duration']} s")
        windows[i] = [first, second, third]
    return windows


def highlight_metrics(
    windows: Sequence[Sequence[float]], scores: Sequence[float], level: int
) -> tuple[float, float]:
    """Compute (AP, hit at 1) of one query at a saliency level.

    AP is averaged over the three annotators; a hit needs the agreement of any of them.
    """
    truth = [[int(rating >= level) for rating in window] for window in windows]
    ap = sum(saliency_ap([window[who] for window in truth], scores) for who in range(3)) / 3
    top = max(range(len(scores)), key=lambda i: scores[i]) if scores else len(truth)  # the first, as argmax
    return ap, float(any(truth[top])) if top < len(truth) else 0.0
