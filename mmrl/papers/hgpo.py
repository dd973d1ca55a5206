"""HGPO (arXiv 2602.22817): compare turns that follow the same recent states, at several depths.

Title: Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks
Formula: A = sum_k w_k a_k / sum_k w_k, a_k the return less its mean over turns with the same last k states,
w_k = (k + 1)^alpha.
Our reading: turns without a comparable turn have advantage 0.
"""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.advantages.notes import tagged_as
from mmrl.advantages.select import returns
from mmrl.advantages.turns import away_from_mean
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, Probability, Tag, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.tensor import group_index


@advantage(every_turn=True)
def history_groups(
    table: RewardTable,
    *,
    depth: NonNegativeInt = 2,
    gamma: Probability = 0.95,
    alpha: NonNegativeFloat = 1.0,
    weight_offset: NonNegativeInt = 1,
    scale: Literal["none", "group"] = "none",
    state: Tag = "state",
    by: Tags = ("group",),
) -> RewardTable:
    """Compare turns with the same recent states, at several depths (HGPO, arXiv 2602.22817).

    For k = 1 to depth + 1, a_k is the return of a turn less the mean over the turns of the group whose last k
    states are the same; A is the mean of those a_k that are not 0, weighted by (k + weight_offset)^alpha.
    Turns that nothing can be compared with have 0. Put it after `total`.

    Args:
        depth: Number of earlier states in the longest history (the paper: 2 or 4).
        gamma: Discount of the next turn.
        alpha: How much more long histories weigh.
        weight_offset: 1 as in the code, 0 as the paper numbers.
        scale: Divide by the deviation of the group (over its number), or by nothing.
        state: Tag of the state that a turn starts from.
        by: Keys that define a group.
    """
    named = tagged_as(table, state) != 0
    later = returns(table, gamma=gamma)
    context, known = table.index((*by, state)), table.present & named
    total, weights = torch.zeros_like(later.values), torch.zeros_like(later.values)
    for k in range(1, depth + 2):
        groups = GroupStatistics(later.values, later.valid & known[:, None], context)
        apart = torch.where(groups.valid, away_from_mean(groups, scale == "group", 1e-6, unbiased=False), 0.0)
        weight = torch.where(apart != 0, float(k + weight_offset) ** alpha, 0.0)
        total, weights = total + weight * apart, weights + weight
        # The last k + 1 states are those last k of this turn and of the one before.
        before = torch.cat([context[:, :1], context[:, :-1]], 1)
        context = group_index([context.flatten(), before.flatten()]).view(context.shape)
        known = known & torch.cat([torch.zeros_like(known[:, :1]), known[:, :-1]], 1)
    return later.put(total / (weights + 1e-6))
