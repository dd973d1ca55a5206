"""Advantage functions whose baseline is not the mean of the group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import NonNegativeFloat, PositiveInt, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable

Singleton = Literal["zero", "raw"]


def clear_flat_groups(
    table: RewardTable, groups: GroupStatistics, credit: Tensor, singleton: Singleton
) -> Tensor:
    """Set `credit` to 0 in groups of equal rewards; a group of one row gets its reward (`raw`) or 0."""
    alone = table.values if singleton == "raw" else 0.0
    return torch.where(groups.count() < 2, alone, torch.where(groups.flat(), 0.0, credit))


@advantage
def virtual_maximum(
    table: RewardTable,
    *,
    max_reward: float = 1.0,
    num_virtual: PositiveInt = 1,
    by: Tags = BY_GROUP,
    eps: NonNegativeFloat = 1e-6,
    singleton: Singleton = "zero",
) -> RewardTable:
    """Normalise rewards as if a group had more perfect answers, so that all-wrong groups learn (NGRPO).

    Mean and standard deviation (with n - 1) include `num_virtual` rewards of `max_reward`. All rows of
    an all-wrong group get the same negative advantage, and those of an all-right group get 0. Published as
    code only (nangongrui-ngr/NGRPO). Put it after `total`, and use the filter `not_all_right`.

    Args:
        max_reward: Reward of a perfect answer.
        num_virtual: Number of virtual perfect answers.
        by: Keys that define a group.
        eps: Added to the standard deviation.
        singleton: Advantage of a group of one row: 0 (`zero`) or its reward (`raw`).
    """
    groups = table.groups(by)
    count = groups.count()
    total = count + num_virtual
    mean = (groups.sum() + num_virtual * max_reward) / total
    squares = groups.std(unbiased=False).square() * count + count * (groups.mean() - mean).square()
    squares = squares + num_virtual * (max_reward - mean).square()
    credit = (table.values - mean) / ((squares / (total - 1)).sqrt() + eps)
    perfect = groups.flat() & ((table.values - max_reward).abs() <= EQUAL)
    alone = table.values if singleton == "raw" else 0.0
    return table.put(torch.where(count < 2, alone, torch.where(perfect, 0.0, credit)))


@advantage
def best_margin(table: RewardTable, *, by: Tags = BY_GROUP, eps: NonNegativeFloat = 1e-6) -> RewardTable:
    """Give a group's best row its lead over the second best, and others 0 (Pass@k, verl's `grpo_passk`).

    The lead is divided by the standard deviation of the group. It is 0 if two rows are equally good.
    """
    groups = table.groups(by)
    count, rank = groups.count().long(), groups.rank()
    lead = groups.largest() - groups.at_rank(count - 2)
    best = table.valid & (rank == count - 1)
    credit = torch.where(best, lead / (groups.std() + eps), 0.0)
    return table.put(clear_flat_groups(table, groups, credit, "zero"))
