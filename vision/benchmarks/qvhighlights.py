"""QVHighlights (arXiv 2107.09609): metrics of moment retrieval and highlight detection for one query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.vision.benchmarks.time_spans import Span, overlap_and_union

THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))  # 0.5, 0.55, ..., 0.95
LEVELS = {"Fair": 2, "Good": 3, "VeryGood": 4}  # minimum rating of each level; ratings are 0 to 4
MAX_WINDOWS = 10  # maximum number of windows per answer in the official evaluation
WINDOW_SECONDS = 2  # length in seconds of the windows with saliency scores (the data set calls them clips)


def true_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Compute the IoU of two time windows; disjoint windows give 0."""
    overlap, union = overlap_and_union(a, b)
    return overlap / union if union > 0 else 0.0


def detection_ap(targets: Sequence[Span], windows: Sequence[Sequence[float]], threshold: float) -> float:
    """Compute the average precision of (start, end, score) windows at one IoU threshold.

    Windows are matched in order of decreasing score. Each window takes the unmatched target with the highest
    IoU of at least `threshold`. Precision is interpolated over recall (VOC 2011). Without windows AP is 0.
    """
    taken: set[int] = set()
    hits = []
    for window in sorted(windows, key=lambda w: -w[2]):
        near = sorted(((true_iou(window, target), i) for i, target in enumerate(targets)), reverse=True)
        # A target can be matched once: a second window on the same target is a false positive.
        match = next((i for overlap, i in near if overlap >= threshold and i not in taken), None)
        hits.append(match is not None)
        taken |= {match} - {None}
    true, points = 0, []
    for rank, hit in enumerate(hits, 1):
        true += hit
        points.append((true / len(targets), true / rank))
    # Interpolated precision is the running maximum from the end; weight it by the increases of recall.
    area, best, right = 0.0, 0.0, 1.0
    for recall, precision in reversed(points):
        area += (right - recall) * best
        best, right = max(best, precision), recall
    return area + right * best


def saliency_ap(truth: Sequence[int], scores: Sequence[float]) -> float:
    """Compute the average precision of saliency scores; `truth` is 1 for highlight windows, else 0.

    The result is the mean of the interpolated precision over all increases of recall. It is 0 if no window is
    a highlight, and 1 if all are. Missing scores count as 0, surplus scores are ignored.
    """
    scores = [*scores[: len(truth)], *[0.0] * (len(truth) - len(scores))]
    if len(set(truth)) == 1:
        return float(truth[0])
    positives, points = sum(truth), []
    for threshold in sorted(set(scores), reverse=True):  # add windows of equal score together
        chosen = [t for t, score in zip(truth, scores, strict=True) if score >= threshold]
        points.append((sum(chosen) / positives, sum(chosen) / len(chosen)))
    best, rises = 0.0, []
    for i, (recall, precision) in reversed([*enumerate(points)]):
        best = max(best, precision)
        if recall > (points[i - 1][0] if i else 0.0):
            rises.append(best)
    return sum(rises) / len(rises)


def saliency_of_windows(row: Mapping[str, Any]) -> list[list[float]]:
    """List three annotators' saliency scores of each two-second window of a row's video; 0 if unrated."""
    windows = [[0.0, 0.0, 0.0] for _ in range(int(row["duration"] / WINDOW_SECONDS))]
    for i, (first, second, third) in zip(row["relevant_clip_ids"], row["saliency_scores"], strict=True):
        if not 0 <= i < len(windows):
            raise IndexError(f"there is no window {i} of two seconds in {row['duration']} s")
        windows[i] = [first, second, third]
    return windows


def highlight_metrics(
    windows: Sequence[Sequence[float]], scores: Sequence[float], level: int
) -> tuple[float, float]:
    """Compute (AP, HIT@1) of one query at a saliency level.

    AP is averaged over three annotators. HIT@1 is 1 if any of them rates the top-scored window >= `level`.
    """
    truth = [[int(rating >= level) for rating in window] for window in windows]
    ap = sum(saliency_ap([window[who] for window in truth], scores) for who in range(3)) / 3
    top = max(range(len(scores)), key=lambda i: scores[i]) if scores else len(truth)  # ties: the first
    return ap, float(any(truth[top])) if top < len(truth) else 0.0
