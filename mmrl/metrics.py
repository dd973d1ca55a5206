"""Metrics of the answers of a reward table.

Bootstrap intervals come from evaluating them on resampled tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import metric
from mmrl.core.reward_table import RewardTable


@metric
def mean(table: RewardTable, *, of: str = "", label: str = "") -> dict[str, float]:
    """Mean of a reward over the answers to which it applies; without `of`, of every reward."""
    names = [of] if of else list(table.scored)
    return {label or name: float(table.at_end(name).nanmean()) for name in names}  # NaN where all are


@metric
def recall_at(
    table: RewardTable, *, of: str, at: tuple[float, ...], strict: bool = False, label: str = ""
) -> dict[str, float]:
    """Share of answers whose reward reaches a threshold, for each threshold, such as R1@m.

    R1@m is `of: temporal_iou, label: R1`.

    Args:
        of: Name of the reward.
        at: Thresholds.
        strict: Require more than the threshold, as in the later evaluator of Time-R1 (arXiv 2503.13377).
        label: Name before `@`; without it, that of the reward.
    """
    reward = table.at_end(of)
    known = reward[~reward.isnan()]
    passes = torch.gt if strict else torch.ge  # NaN would count as missed
    return {f"{label or of}@{bar:g}": float(passes(known, bar).double().mean()) for bar in at}


# ---- metrics of counts: ratios of sums over all answers, and binary classification


@metric
def ratio_of_sums(
    table: RewardTable,
    *,
    of: str,
    over: str = "",
    complement: bool = False,
    scale: float = 1.0,
    offset: float = 0.0,
    label: str = "",
) -> dict[str, float]:
    """Ratio of two summed counts, over the answers that have both; NaN where none has.

    A denominator of 0 gives 0.

    Args:
        of: Reward in the numerator.
        over: Reward in the denominator; without it, the number of answers.
        complement: Return one minus the ratio.
        scale: Factor of the result; 100 gives percent.
        offset: Added to the denominator, as some evaluation scripts do.
        label: Name of the metric; without it, that of the numerator.
    """
    top = table.at_end(of).double()
    bottom = table.at_end(over).double() if over else torch.ones_like(top)
    known = ~(top.isnan() | bottom.isnan())
    if not known.any():
        return {label or of: math.nan}
    ratio = _share(float(top[known].sum()), float(bottom[known].sum()) + offset)
    return {label or of: scale * (1 - ratio if complement else ratio)}


@metric
def binary_classification(
    table: RewardTable,
    *,
    answer: str,
    truth: str,
    positive: float = 1.0,
    scale: float = 1.0,
    offset: float = 0.0,
    f1_offset: float = 0.0,
    decimals: NonNegativeInt | None = None,
    share_name: str = "positive_ratio",
    label: str = "",
) -> dict[str, float]:
    """Accuracy, precision, recall, F1 and share of positive answers, over the answers with both labels.

    NaN where no answer has both. An answer that is neither label is wrong. A denominator of 0 gives 0.
    Scripts differ in their offsets and in rounding, so both are options.

    Args:
        answer: Reward with the predicted label.
        truth: Reward with the true label.
        positive: Value of the positive label.
        scale: Factor of the results; 100 gives percent.
        offset: Added to all denominators but that of F1.
        f1_offset: Added to the denominator of F1.
        decimals: Digits to which results are rounded, precision and recall before F1; null rounds nothing.
        share_name: Name of the share of positive answers.
        label: Prefix of the names.
    """
    predicted, true = table.at_end(answer), table.at_end(truth)
    known = ~(predicted.isnan() | true.isnan())
    predicted, true = predicted[known], true[known]
    flagged, real = predicted == positive, true == positive

    def share(top: torch.Tensor, bottom: float) -> float:
        value = scale * _share(float(top.sum()), bottom + offset)
        return value if decimals is None else round(value, decimals)

    precision = share(flagged & real, float(flagged.sum()))
    recall = share(flagged & real, float(real.sum()))
    # Precision and recall have the scale (and rounding) of the results; f1 = 2 p r / (p + r) is of shares.
    f1 = scale * _share(2 * precision * recall / scale**2, (precision + recall) / scale + f1_offset)
    named = {
        "accuracy": share(predicted == true, len(predicted)),
        "precision": precision,
        "recall": recall,
        "f1": f1 if decimals is None else round(f1, decimals),
        share_name: share(flagged, len(predicted)),
    }
    known_some = bool(known.any())  # else every share would be 0, like a result
    return {
        f"{label}/{name}" if label else name: value if known_some else math.nan
        for name, value in named.items()
    }


@metric
def weighted_sum(
    table: RewardTable,
    *,
    metric: tuple[Callable, ...],
    weights: Mapping[str, float],
    constant: float = 0.0,
    label: str,
) -> dict[str, float]:
    """Weighted sum of other metrics and a constant; returns those metrics too.

    Args:
        metric: Metrics whose numbers are read.
        weights: Weight of every number in the sum, by its name.
        constant: Added to the sum.
        label: Name of the sum.
    """
    numbers = _numbers(table, metric, weights, "`weighted_sum` weighs")
    return {**numbers, label: constant + sum(weight * numbers[name] for name, weight in weights.items())}


@metric
def harmonic_mean(
    table: RewardTable, *, metric: tuple[Callable, ...], of: tuple[str, ...], label: str
) -> dict[str, float]:
    """Harmonic mean of other metrics, as in F1; returns those metrics too.

    With a 0 among them it is 0.

    Args:
        metric: Metrics whose numbers are read.
        of: Names of the numbers to combine.
        label: Name of the harmonic mean.
    """
    numbers = _numbers(table, metric, of, "`harmonic_mean` combines")
    values = [numbers[name] for name in of]
    # With a 0 the limit is 0, but its inverse is not defined.
    mean = len(values) / sum(1 / value for value in values) if all(values) else 0.0
    return {**numbers, label: mean}


def _numbers(
    table: RewardTable, metrics: Sequence[Callable], wanted: Collection[str], what: str
) -> dict[str, float]:
    numbers = {name: value for metric in metrics for name, value in metric(table).items()}
    missing = sorted(set(wanted) - set(numbers))
    if missing:
        raise ValueError(f"{what} {missing}, but its metrics give {sorted(numbers)}")
    return numbers


def _share(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0
