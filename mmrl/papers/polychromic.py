"""Polychromic objective (arXiv 2509.25424): sets of answers earn mean reward times diversity.

Title: Polychromic Objectives for Reinforcement Learning
Formula: A = score(set) - mean score of the group's sets, score = mean reward x share of distinct answers.
Our reading: sets are successive rows of a group, which all start from the prompt, and are not drawn again.
"""

from __future__ import annotations

from typing import Annotated

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import clusters
from mmrl.config.ranges import BelowGenerations, PositiveInt, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.tensor import group_index


@advantage
def set_baseline(
    table: RewardTable,
    *,
    of: str,
    size: Annotated[PositiveInt, BelowGenerations()] = 4,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Score sets of answers by success and diversity, and compare sets (Polychromic, arXiv 2509.25424).

    A set scores its mean reward times its share of distinct answers; the advantage of each member is that
    score less the mean score of the group's sets. Our reading: sets are `size` successive rows of a group,
    which all start from the prompt, and are not drawn again. Sets of one row make it `group_center`.

    Args:
        of: Name of the label that is equal for equal answers, such as `answer_cluster`; an answer without
            it is unlike all others.
        size: Number of answers of a set; the last set of a group may be smaller.
        by: Keys that define a group.
    """
    groups, index = table.groups(by), table.index(by)
    if 1 < (most := int(groups.count().max()) if table.valid.any() else 0) <= size:
        raise ValueError(
            f"`set_baseline` compares sets of {size} answers, but no group has more than {most}, so every "
            "advantage would be 0; set `size` lower, or ask for more rollouts of a prompt"
        )
    order = torch.arange(index.numel(), dtype=torch.float64).view(index.shape)[:, None]
    turn = GroupStatistics(order, table.present[:, None], index).rank()[:, 0]  # (N, K) in the group
    sets = group_index([index.flatten(), turn.div(size, rounding_mode="floor").flatten()]).view(index.shape)
    copies = GroupStatistics(table.values, table.valid, clusters(table, of, sets)).count().clamp(min=1)
    distinct = GroupStatistics(1 / copies, table.valid, sets).mean()  # (number of clusters) / (of answers)
    members = GroupStatistics(table.values, table.valid, sets)
    score = members.mean() * distinct
    once = table.valid & (members.rank() == 0)  # every set counts once
    mean = GroupStatistics(score, once, index).mean()
    return table.put(torch.where(groups.count() < 2, 0.0, score - mean))
