"""Advantage functions with other baselines than the mean of the group."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import row_mean
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Tag, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable

Singleton = Literal["zero", "raw"]


def _compared(table: RewardTable, groups: GroupStatistics, credit: Tensor, singleton: Singleton) -> Tensor:
    """Give 0 to groups of equal rewards, and 0 or the reward to groups of one."""
    alone = table.values if singleton == "raw" else 0.0
    return torch.where(groups.count() < 2, alone, torch.where(groups.flat(), 0.0, credit))


@advantage
def group_median(
    table: RewardTable,
    *,
    by: Tags = BY_GROUP,
    mad_floor: PositiveFloat = 1e-3,
    drop_pivot: bool = True,
) -> RewardTable:
    """Subtract the group's median and divide by the median absolute deviation (MC-GRPO, arXiv 2601.22582).

    The median is the lower of two middle rewards. With rewards of 0 and 1 most deviations are 0, and an
    advantage can reach 1 / mad_floor: add `clip_advantage`. Our reading: of several rows that equal the
    median, the first is dropped; with several rewards, a row that is the median of all of them.

    Args:
        by: Keys that define a group.
        mad_floor: Added to the median absolute deviation, in units of reward.
        drop_pivot: Do not learn from the one row of each group that is its median, so that G of G + 1
            sampled rows are learned from.
    """
    groups = table.groups(by)
    median = groups.median()
    away = table.values - median
    spread = dataclasses.replace(groups, values=away.abs()).median()
    credit = _compared(table, groups, away / (spread + mad_floor), "zero")
    if not drop_pivot:
        return table.put(credit)
    candidates = table.valid & (table.values == median)
    rank = groups.rank()
    first = dataclasses.replace(groups, values=rank.double(), valid=candidates).smallest()
    pivot = (candidates & (rank == first)).all(1)  # (N, K)
    return table.replace(values=credit, learn=table.learn & ~pivot)


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
    """Normalise as if perfect answers were in every group, so that all-wrong groups learn (NGRPO).

    Mean and deviation (divided by n - 1) are those of the group's rewards and `num_virtual` times
    `max_reward`. A group that is all wrong has one negative advantage, a group that is all right has 0.
    Published as code only (nangongrui-ngr/NGRPO). Put it after `total`, and use the filter `not_all_right`.

    Args:
        max_reward: Reward of a perfect answer.
        num_virtual: How many perfect answers are added to the statistics.
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
def log_mean_exp(
    table: RewardTable,
    *,
    tau: PositiveFloat = 1.0,
    by: Tags = BY_GROUP,
    singleton: Singleton = "zero",
) -> RewardTable:
    """Subtract tau log mean exp(r / tau) of the group and divide by 1 + tau (OPMD, arXiv 2509.24203).

    Args:
        tau: Temperature, in units of reward; the baseline goes from the largest reward (tau near 0) to the
            mean (large tau).
        by: Keys that define a group.
        singleton: Advantage of a group of one row: 0 (`zero`) or its reward (`raw`).
    """
    groups = table.groups(by)
    largest = groups.largest()  # taken out of the exponent, which it would overflow
    shifted = torch.where(table.valid, table.values - largest, 0.0)
    mean = dataclasses.replace(groups, values=(shifted / tau).exp()).mean()
    away = torch.where(table.valid, shifted - tau * mean.clamp(min=1e-300).log(), 0.0)
    return table.put(_compared(table, groups, away / (1 + tau), singleton))


@advantage
def length_baseline(table: RewardTable, *, by: Tags = BY_GROUP, singleton: Singleton = "zero") -> RewardTable:
    """Subtract the mean reward of the group, weighted by length (OPO, arXiv 2505.23585).

    b = sum(L r) / sum(L), where L is the number of steps that made the outcome, at least 1. `singleton` is
    the advantage of a group of one row: 0 (`zero`) or its reward (`raw`).
    """
    groups = table.groups(by)
    length = table.ends.clamp(min=1).double()[:, None].expand_as(table.values)
    weighed = dataclasses.replace(groups, values=length * table.values).sum()
    baseline = weighed / dataclasses.replace(groups, values=length).sum().clamp(min=1)
    return table.put(_compared(table, groups, table.values - baseline, singleton))


@advantage
def best_margin(table: RewardTable, *, by: Tags = BY_GROUP, eps: NonNegativeFloat = 1e-6) -> RewardTable:
    """Give the best row its lead over the second best, over the group's deviation, and 0 to all others.

    The advantage for Pass@k as verl has it (`grpo_passk`). Where two rows are the best, all have 0.
    """
    groups = table.groups(by)
    count, rank = groups.count().long(), groups.rank()
    lead = groups.largest() - groups.at_rank(count - 2)
    best = table.valid & (rank == count - 1)
    credit = torch.where(best, lead / (groups.std() + eps), 0.0)
    return table.put(_compared(table, groups, credit, "zero"))


@advantage(notes={"entropy"})
def conditional_halves(
    table: RewardTable,
    *,
    covariate: Literal["entropy", "length"] = "entropy",
    mu: float = 1.0,
    a: float = 1.0,
    b: float = 0.0,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Compare with the half of the group across the median entropy (CANON, arXiv 2509.23962).

    The half of higher entropy (or length) is the larger one for an odd number of rows; ties go by row. A
    mean of no rows is 0 in the code; our reading: groups of one have advantage 0, and equal rewards too
    where `a` is 1 and `b` is 0. A row without a noted entropy belongs to the higher half.

    Args:
        covariate: What splits a group: the mean entropy of the answer's steps, or its number of steps.
        mu: Weight of the comparison with the other half; 1 - mu is that of the own half. With 0.5 and
            halves of one size it is Dr. GRPO.
        a: Factor on what stands for the lower half (its mean and its rewards), with `length` for the higher
            one; `length` and a < 1 prefers short answers.
        b: Added to the advantage of the higher half and taken from that of the lower.
        by: Keys that define a group.
    """
    groups = table.groups(by)
    key = (
        row_mean(table, "entropy")[:, None, None] if covariate == "entropy" else table.ends[:, None].double()
    )
    key = key.expand_as(table.values).nan_to_num(nan=torch.inf)
    low = table.valid & (
        dataclasses.replace(groups, values=key).rank() < groups.count().div(2, rounding_mode="floor")
    )
    mean_low = dataclasses.replace(groups, valid=low).mean()
    mean_high = dataclasses.replace(groups, valid=table.valid & ~low).mean()
    reward = table.values
    if covariate == "entropy":
        other = torch.where(low, a * reward - mean_high - b, reward - a * mean_low + b)
    else:
        other = torch.where(low, reward - a * mean_high - b, a * reward - mean_low + b)
    own = reward - torch.where(low, mean_low, mean_high)
    credit = mu * other + (1 - mu) * own
    neutral = (groups.flat() & (a == 1 and b == 0)) | (groups.count() < 2)
    return table.put(torch.where(neutral, 0.0, credit))


@advantage
def greedy_baseline(table: RewardTable, *, tag: Tag = "greedy", by: Tags = ("group",)) -> RewardTable:
    """Subtract the reward of the greedy answer, which is not learned from (ReMax, arXiv 2310.10505).

    It is that of the rows that an engine tagged, as `vision.with_greedy` does; of several the mean. A group
    whose greedy answer has no reward is not learned from: our reading. Put it after `total`.

    Args:
        tag: The tag of greedy rows.
        by: Keys that define a group.
    """
    if not len(table):
        return table
    if tag not in table.ids:
        raise ValueError(
            f"`greedy_baseline` wants rows tagged '{tag}', and no row is; add the engine "
            "`vision.with_greedy` after `vision.generate`"
        )
    greedy = table.ids[tag] != 0
    answers = table.valid & greedy[:, None] & (table.ids["place"] == table.last[:, None])[:, None]
    baseline = GroupStatistics(table.values, answers, table.index(by))
    known = baseline.count() > 0
    return table.replace(
        values=torch.where(known, table.values - baseline.mean(), 0.0),
        valid=table.valid & known,
        learn=table.learn & ~greedy,
    )
