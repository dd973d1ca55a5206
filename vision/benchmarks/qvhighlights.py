"""Moment retrieval and highlight detection as the official evaluator of QVHighlights (arXiv 2107.09609)
computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.vision.benchmarks.time_spans import Span

THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
LEVELS = {"Fair": 2, "Good": 3, "VeryGood": 4}
LENGTHS = {"short": (0, 10), "middle": (10, 30), "long": (30, 150), "full": (0, 150)}
MAX_WINDOWS = 10
CLIP_SECONDS = 2


def _true_iou(a: Sequence[float], b: Sequence[float]) -> float:
    overlap = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    union = (a[1] - a[0]) + (b[1] - b[0]) - overlap
    return overlap / union if union > 0 else 0.0


def detection_ap(targets: Sequence[Span], windows: Sequence[Sequence[float]], threshold: float) -> float:
    """Compute the average precision of (start, end, score) windows at one IoU threshold.

    Windows are taken by falling score; each takes the unmatched target of highest IoU that reaches the
    threshold. Precision is interpolated over recall (VOC 2011). Without windows it is 0.
    """
    taken: set[int] = set()
    hits = []
    for window in sorted(windows, key=lambda w: -w[2]):
        near = sorted(((_true_iou(window, target), i) for i, target in enumerate(targets)), reverse=True)
        match = next((i for overlap, i in near if overlap >= threshold and i not in taken), None)
        hits.append(match is not None)
        taken |= {match} - {None}
    found, points = 0, []
    for rank, hit in enumerate(hits, 1):
        found += hit
        points.append((found / len(targets), found / rank))
    # Going back from the end, precision never falls; what each step of recall adds is weighed with it.
    area, best, right = 0.0, 0.0, 1.0
    for recall, precision in reversed(points):
        area += (right - recall) * best
        best, right = max(best, precision), recall
    return area + right * best


def saliency_ap(truth: Sequence[int], scores: Sequence[float]) -> float:
    """Compute the average precision of clip scores: the mean of interpolated precision over every rise of
    recall.

    All-negative truth gives 0, all-positive 1. Scores too few count as 0, scores too many are cut.
    """
    scores = [*scores[: len(truth)], *[0.0] * (len(truth) - len(scores))]
    if len(set(truth)) == 1:
        return float(truth[0])
    positives, points = sum(truth), []
    for bar in sorted(set(scores), reverse=True):
        chosen = [t for t, score in zip(truth, scores, strict=True) if score >= bar]
        points.append((sum(chosen) / positives, sum(chosen) / len(chosen)))
    best, rises = 0.0, []
    for i in reversed(range(len(points))):
        best = max(best, points[i][1])
        before = points[i - 1][0] if i else 0.0
        if points[i][0] > before:
            rises.append(best)
    return sum(rises) / len(rises)


def clip_scores(row: Mapping[str, Any]) -> list[list[float]]:
    """Lay the annotated saliency of a row over all its clips of two seconds: three scores each, 0 where
    nobody rated."""
    clips = [[0.0, 0.0, 0.0] for _ in range(int(row["duration"] / CLIP_SECONDS))]
    for clip, (first, second, third) in zip(row["relevant_clip_ids"], row["saliency_scores"], strict=True):
        if not 0 <= clip < len(clips):
            raise IndexError(f"there is no clip {clip} of two seconds in {row['duration']} s")
        clips[clip] = [first, second, third]
    return clips


def highlight_metrics(
    clips: Sequence[Sequence[float]], scores: Sequence[float], level: int
) -> tuple[float, float]:
    """Compute (AP, hit at 1) of one query at a level of saliency: AP averaged over the three annotators, a
    hit if any agrees."""
    truth = [[int(rating >= level) for rating in clip] for clip in clips]
    ap = sum(saliency_ap([clip[who] for clip in truth], scores) for who in range(3)) / 3
    top = max(range(len(scores)), key=lambda i: scores[i]) if scores else len(truth)
    return ap, float(any(truth[top])) if top < len(truth) else 0.0


def evaluate(
    submission: Sequence[Mapping[str, Any]], ground_truth: Sequence[Mapping[str, Any]], official: bool = False
) -> dict[str, float]:
    """Compute the metrics of the official evaluator, in percent with two decimals, under its names.

    A query without predicted windows counts as AP 0 and R1 0; with `official` it is left out of mAP, as the
    evaluator does, and R1 raises, as the evaluator does. Queries must be the same on both sides.
    """
    predicted = {row["qid"]: row for row in submission}
    wanted = {row["qid"]: row for row in ground_truth}
    if set(predicted) != set(wanted):
        odd = sorted(set(predicted) ^ set(wanted), key=str)[:3]
        raise ValueError(
            f"submission and ground truth must hold the same queries; these stand in one of them only: {odd}"
        )
    metrics: dict[str, float] = {}
    if all("pred_relevant_windows" in row for row in submission):
        for name, (low, high) in LENGTHS.items():
            metrics |= _retrieval(predicted, wanted, name, low, high, official)
    if all("pred_saliency_scores" in row for row in submission):
        for name, level in LEVELS.items():
            pairs = [
                highlight_metrics(clip_scores(wanted[q]), predicted[q]["pred_saliency_scores"], level)
                for q in wanted
            ]
            metrics[f"HL-min-{name}-mAP"] = _percent([ap for ap, _ in pairs])
            metrics[f"HL-min-{name}-Hit1"] = _percent([hit for _, hit in pairs])
    return metrics


def _retrieval(
    predicted: Mapping, wanted: Mapping, name: str, low: float, high: float, official: bool
) -> dict[str, float]:
    kept = {}
    for query, row in wanted.items():
        windows = [w for w in row["relevant_windows"] if name == "full" or low < w[1] - w[0] <= high]
        if windows:
            kept[query] = windows
    windows = {query: predicted[query]["pred_relevant_windows"][:MAX_WINDOWS] for query in kept}
    scored = [query for query in kept if windows[query] or not official]
    aps = {t: [detection_ap(kept[q], windows[q], t) for q in scored] for t in THRESHOLDS}
    top = [max(_true_iou(windows[q][0], w) for w in kept[q]) if windows[q] or official else 0.0 for q in kept]
    mean = [sum(column) / len(column) for column in zip(*aps.values(), strict=True)]
    metrics = {f"MR-{name}-mAP": _percent(mean)}
    metrics |= {f"MR-{name}-mAP@{t:g}": _percent(aps[t]) for t in THRESHOLDS}
    return metrics | {f"MR-{name}-R1@{t:g}": _percent([overlap >= t for overlap in top]) for t in THRESHOLDS}


def _percent(values: Sequence[float]) -> float:
    return round(100 * sum(values) / len(values), 2) if values else float("nan")
