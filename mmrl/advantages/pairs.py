"""Preference pairs out of rewards."""

from __future__ import annotations

import torch

from mmrl.registry import advantage
from mmrl.table import EQUAL, RewardTable
from mmrl.tensor import group_extreme


@advantage
def best_vs_worst(
    table: RewardTable, *, margin: float = 0.0, by: tuple[str, ...] = ("group", "place")
) -> RewardTable:
    """Set the best of every group to 1 and the worst to -1, and do not learn from the rest: preference pairs
    (DPO, arXiv 2305.18290).

    A group in which best and worst are equal, or not more than `margin` apart, is not learned from. Of
    several that are best (worst) the first is taken. Of several rewards each makes pairs of its own.
    """
    rows, rewards, places = table.values.shape
    index = table.index(by).flatten()
    value = table.values.transpose(1, 2).reshape(rows * places, rewards)
    known = table.valid.transpose(1, 2).reshape(value.shape) & table.present.flatten()[:, None]
    best, worst = (group_extreme(value, index, known, largest) for largest in (True, False))
    apart = best - worst > max(margin, EQUAL)
    order = torch.arange(len(value), dtype=value.dtype)[:, None].expand_as(value)
    pair = torch.zeros_like(value)
    for sign, extreme in ((1.0, best), (-1.0, worst)):
        candidates = known & apart & (value == extreme)
        first = candidates & (order == group_extreme(order, index, candidates, largest=False))
        pair = torch.where(first, sign, pair)
    pair = pair.view(rows, places, rewards).transpose(1, 2)
    return table.replace(values=pair, learn=table.learn & pair.any(1))
