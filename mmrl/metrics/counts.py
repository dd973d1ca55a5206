"""Metrics of counts: ratios of sums over all answers, which are not means of ratios, and yes-or-no tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import metric
from mmrl.core.reward_table import RewardTable


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
    """Divide the sum of one count by that of another (without `over`: by the number of answers), over the
    answers that have both; NaN where none has.

    `complement` gives one minus the ratio, `scale: 100` percents. `offset` is what a script starts its
    denominator with. A denominator of 0 gives 0.
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
    """Compute accuracy, precision, recall, F1 and the share of positive answers from two labels, over the
    answers that have both; NaN where none has.

    That share goes under `share_name`. An answer that is neither label is wrong. Scripts differ in what they
    add to their denominators (`offset`), to that of F1 (`f1_offset`), and in rounding precision and recall to
    `decimals` before F1. A denominator of 0 gives 0.
    """
    given, true = table.at_end(answer), table.at_end(truth)
    known = ~(given.isnan() | true.isnan())
    given, true = given[known], true[known]
    said, real = given == positive, true == positive

    def share(top: torch.Tensor, bottom: float) -> float:
        value = scale * _share(float(top.sum()), bottom + offset)
        return value if decimals is None else round(value, decimals)

    precision = share(said & real, float(said.sum()))
    recall = share(said & real, float(real.sum()))
    f1 = scale * _share(2 * precision * recall / scale**2, (precision + recall) / scale + f1_offset)
    named = {
        "accuracy": share(given == true, len(given)),
        "precision": precision,
        "recall": recall,
        "f1": f1 if decimals is None else round(f1, decimals),
        share_name: share(said, len(given)),
    }
    known_some = bool(known.any())
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
    """Add up weighted numbers of other metrics and a constant; gives them all, the sum under `label`."""
    found = {name: value for one in metric for name, value in one(table).items()}
    missing = sorted(set(weights) - set(found))
    if missing:
        raise ValueError(f"`weighted_sum` weighs {missing}, but its metrics give {sorted(found)}")
    return {**found, label: constant + sum(weight * found[name] for name, weight in weights.items())}


@metric
def harmonic_mean(
    table: RewardTable, *, metric: tuple[Callable, ...], of: tuple[str, ...], label: str
) -> dict[str, float]:
    """Combine numbers of other metrics by their harmonic mean, as F1 does; gives them all. With a 0 among
    them it is 0."""
    found = {name: value for one in metric for name, value in one(table).items()}
    missing = sorted(set(of) - set(found))
    if missing:
        raise ValueError(f"`harmonic_mean` combines {missing}, but its metrics give {sorted(found)}")
    values = [found[name] for name in of]
    mean = len(values) / sum(1 / value for value in values) if all(values) else 0.0
    return {**found, label: mean}


def _share(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0
