"""MC-GRPO (arXiv 2601.22582): the baseline is the median reward of the group instead of the mean.

Title: MC-GRPO: Median-Centered Group Relative Policy Optimization for Small-Rollout Reinforcement Learning
Formula: A = (r - median) / (MAD + floor), over G + 1 answers; the one that is the median is not learned from.
Our reading: of several rows that equal the median, the first is dropped.
"""

from __future__ import annotations

import dataclasses

from mmrl.advantages.baselines import clear_flat_groups
from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import PositiveFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


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
    credit = clear_flat_groups(table, groups, away / (spread + mad_floor), "zero")
    if not drop_pivot:
        return table.put(credit)
    candidates = table.valid & (table.values == median)
    rank = groups.rank()
    first = dataclasses.replace(groups, values=rank.double(), valid=candidates).smallest()
    pivot = (candidates & (rank == first)).all(1)  # (N, K)
    return table.replace(values=credit, learn=table.learn & ~pivot)
