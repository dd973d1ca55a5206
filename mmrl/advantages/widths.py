"""Advantage functions that note how far each step's ratio may move, for the surrogate `elastic_clip`."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import advantage
from mmrl.core.entropy_scale import EntropyScale
from mmrl.core.reward_table import RewardTable


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
