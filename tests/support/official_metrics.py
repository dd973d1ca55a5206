"""Reference implementations of the official evaluation scripts of CHAIR, AMBER and QVHighlights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.vision.benchmarks.amber import DIMENSIONS, GENERATIVE, AmberScene, Words
from mmrl.vision.benchmarks.chair import COUNTS, ratio
from mmrl.vision.benchmarks.pope import NO, Form, parse_yes_no
from mmrl.vision.benchmarks.qvhighlights import (
    LEVELS,
    MAX_WINDOWS,
    THRESHOLDS,
    detection_ap,
    highlight_metrics,
    saliency_of_windows,
    true_iou,
)

START = 0.001  # AMBER's script starts its denominators here, against division by zero
STARTS = {"attribute": 3 * START}  # the script adds up three of them, each with a start of its own
LENGTHS = {"short": (0, 10), "middle": (10, 30), "long": (30, 150), "full": (0, 150)}


def chair_metrics(counted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Compute the metrics of a corpus as fractions; a ratio over zero is 0 (the scripts divide by zero).

    CHAIRs is the share of captions with a hallucination, CHAIRs_refine that among captions with any mention,
    CHAIRi the share of hallucinated mentions; precision is 1 - CHAIRi.
    """
    total = {name: sum(counts[name] for counts in counted) for name in COUNTS}
    precision = 1 - ratio(total["hallucinated"], total["mentions"])
    recall = ratio(total["correct"], total["truth"])
    return {
        "CHAIRs": ratio(total["hallucinating"], len(counted)),
        "CHAIRs_refine": ratio(total["hallucinating"], total["mentioning"]),
        "CHAIRi": ratio(total["hallucinated"], total["mentions"]),
        "precision": precision,
        "recall": recall,
        "f1": ratio(2 * precision * recall, precision + recall),
        "tempted": ratio(total["matched"], total["tempting"]),
    }


def amber_metrics(
    responses: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    words: Words,
    *,
    official: bool = True,
    form: Form = "exact",
) -> dict[str, float]:
    """Compute the metrics of AMBER's script for `[{"id", "response"}]`, in percent; ids count from 1.

    `official` starts denominators at 0.001 (those of `attribute`, which pools three counts, at 0.003), adds
    to that of F1, and rounds to one decimal, precision and recall before F1. Dimensions without an answer
    are omitted. `AMBER` is the paper's summary score, which the script does not print.
    """
    counted: list[dict[str, float]] = []
    answered: dict[str, list[tuple[float, float]]] = {}
    for row in responses:
        item = annotations[row["id"] - 1]
        if item["type"] == GENERATIVE:
            scene = AmberScene((*item["truth"],), (*item["hallu"],), words)
            counted.append(scene.counts(row["response"]))
            continue
        pair = parse_yes_no(row["response"], form), float(item["truth"] == "yes")
        dimensions = [name for name, types in DIMENSIONS.items() if item["type"] in types]
        for name in ("discriminative", *dimensions):
            answered.setdefault(name, []).append(pair)
    metrics = _amber_generative(counted, official) if counted else {}
    for name, pairs in answered.items():
        metrics |= {f"{name}/{key}": v for key, v in _amber_discriminative(pairs, name, official).items()}
    if counted and answered:
        metrics["AMBER"] = (100 - metrics["CHAIR"] + metrics["discriminative/f1"]) / 2
    return metrics


def _amber_generative(counted: Sequence[Mapping[str, float]], official: bool) -> dict[str, float]:
    total = {name: sum(counts[name] for counts in counted) for name in counted[0]}
    hal = 100 - 100 * total["clean"] / (len(counted) + START * official)
    return {
        "CHAIR": _percent_from(total["hallucinated"], total["mentions"], START, official),
        "Cover": _percent_from(total["correct"], total["truth"], START, official),
        "Hal": round(hal, 1) if official else hal,
        "Cog": _percent_from(total["matched"], total["tempting"], START, official),
    }


def _amber_discriminative(
    pairs: Sequence[tuple[float, float]], name: str, official: bool
) -> dict[str, float]:
    """Score with "no" as the positive class: a hallucinating model misses that answer."""
    start = STARTS.get(name, START)
    both = sum(answer == truth == NO for answer, truth in pairs)
    accuracy = _percent_from(sum(answer == truth for answer, truth in pairs), len(pairs), start, official)
    precision = _percent_from(both, sum(answer == NO for answer, _ in pairs), start, official)
    recall = _percent_from(both, sum(truth == NO for _, truth in pairs), start, official)
    # The script's own constants: 0.001 for existence, 0.0001 for all others.
    denominator = (precision + recall) / 100 + (0.001 if name == "existence" else 0.0001) * official
    f1 = 2 * precision * recall / 100 / denominator if denominator else 0.0
    f1 = round(f1, 1) if official else f1
    return {"accuracy": accuracy, "precision": precision, "recall": recall, "f1": f1}


def _percent_from(numerator: float, denominator: float, start: float, official: bool) -> float:
    denominator += start * official
    value = 100 * numerator / denominator if denominator else 0.0
    return round(value, 1) if official else value


def qvhighlights_metrics(
    submission: Sequence[Mapping[str, Any]], ground_truth: Sequence[Mapping[str, Any]], official: bool = False
) -> dict[str, float]:
    """Compute the metrics of the official evaluator, in percent with two decimals, under its names.

    A query without predicted windows counts as AP 0 and R1 0; with `official` it is left out of mAP, and R1
    raises, as in the evaluator. Both sides must contain the same queries.
    """
    predicted = {row["qid"]: row for row in submission}
    wanted = {row["qid"]: row for row in ground_truth}
    if set(predicted) != set(wanted):
        odd = sorted(set(predicted) ^ set(wanted), key=str)[:3]
        raise ValueError(
            f"submission and ground truth must contain the same queries; in one of them only: {odd}"
        )
    metrics: dict[str, float] = {}
    if all("pred_relevant_windows" in row for row in submission):
        for name, (low, high) in LENGTHS.items():
            metrics |= _retrieval(predicted, wanted, name, low, high, official)
    if all("pred_saliency_scores" in row for row in submission):
        for name, level in LEVELS.items():
            pairs = [
                highlight_metrics(saliency_of_windows(wanted[q]), predicted[q]["pred_saliency_scores"], level)
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
    top = [max(true_iou(windows[q][0], w) for w in kept[q]) if windows[q] or official else 0.0 for q in kept]
    mean = [sum(column) / len(column) for column in zip(*aps.values(), strict=True)]
    metrics = {f"MR-{name}-mAP": _percent(mean)}
    metrics |= {f"MR-{name}-mAP@{t:g}": _percent(aps[t]) for t in THRESHOLDS}
    return metrics | {f"MR-{name}-R1@{t:g}": _percent([overlap >= t for overlap in top]) for t in THRESHOLDS}


def _percent(values: Sequence[float]) -> float:
    return round(100 * sum(values) / len(values), 2) if values else float("nan")
