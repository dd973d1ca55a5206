"""Advantage functions that note how far each step's ratio may move, for the surrogate `elastic_clip`."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label, noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Probability, Tags
from mmrl.config.registry import advantage
from mmrl.core.entropy_scale import EntropyScale
from mmrl.core.reward_table import GroupStatistics, RewardTable, place_of_steps


@advantage
def variance_width(
    table: RewardTable,
    *,
    of: str,
    span: PositiveFloat = 1.0,
    by_advantage: NonNegativeFloat = 0.5,
    by_variance: NonNegativeFloat = 0.5,
    reference: PositiveFloat = 2.0,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Widen clip ranges with the size of the advantage and the variance of the group (ETR).

    Our reading of arXiv 2601.03723, of which only the abstract was read: the factor of both ranges is
    (1 + by_advantage min(|A| / reference, 1)) (1 + by_variance min(1, 4 var / span^2)), between 0.5 and 3.
    Put it last, and use the surrogate `elastic_clip`.

    Args:
        of: Name of the reward whose variance (over n) counts.
        span: Largest less smallest value of that reward.
        by_advantage: Gain from an advantage of at least `reference`.
        by_variance: Gain from a group with half of its rewards at either end.
        reference: Advantage from which that gain no longer grows.
        by: Keys that define a group.
    """
    measured, index = label(table, of), table.index(by)
    spread = GroupStatistics(measured, ~measured.isnan(), index).std(unbiased=False)
    variance = (4 * spread.square() / span**2).clamp(max=1)[:, 0]  # (N, K)
    table, places = per_step(table), place_of_steps(table.ends, table.longest)
    variance = variance.gather(1, places)
    size = torch.where(table.valid, table.values, 0.0).abs().amax(1)
    factor = (1 + by_advantage * (size / reference).clamp(max=1)) * (1 + by_variance * variance)
    return _widths(table, factor.clamp(0.5, 3), factor.clamp(0.5, 3))


@advantage(notes={"entropy"})
def entropy_width(
    table: RewardTable,
    *,
    alpha: NonNegativeFloat = 1.0,
    beta: NonNegativeFloat = 1.0,
    pivot: Probability = 0.8,
) -> RewardTable:
    """Widen the upper clip range of steps of high entropy, the lower one of low (HAPO, arXiv 2509.16591).

    h = (log H - m) / s, where m is the `pivot` quantile of log H and s the root mean square distance to it,
    is divided by its largest value above 0 and by its largest size below. Above 0 the upper range grows by
    1 + alpha h, below the lower one by 1 + alpha |h|; `elastic_clip` also multiplies advantages by 1 + beta
    h, above 0 outside of half the ranges, below 0 inside. Our readings: entropies are those noted when
    sampling, over the collection, and the sign of low entropies is that of the paper, not of its code.

    Args:
        alpha: Growth of the clip range at the extremes.
        beta: Redistribution of advantages, 0 for none.
        pivot: Quantile (nearest rank) of entropy whose steps keep their range.
    """
    table = per_step(table)
    entropy = noted(table, "entropy")
    known = table.present & ~entropy.isnan()
    h = torch.zeros_like(entropy)
    if known.any():
        h = torch.where(known, EntropyScale.of(entropy[known], pivot)(entropy), 0.0)
    table = table.note("redistribution", 1 + beta * h).note("high_entropy", (h > 0).double())
    return _widths(table, 1 + alpha * (-h).clamp(min=0), 1 + alpha * h.clamp(min=0))


def _widths(table: RewardTable, low: Tensor, high: Tensor) -> RewardTable:
    """Note factors of the lower and upper clip range: (N, T) each, 1 beyond a row's steps."""
    low, high = (torch.where(table.present, factor, 1.0) for factor in (low, high))
    return table.note("clip_low", low).note("clip_high", high)
