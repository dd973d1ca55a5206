"""OPO (arXiv 2505.23585): the baseline is the length-weighted mean reward of the group.

Title: On-Policy RL with Optimal Reward Baseline
Formula: A = r - sum(L r) / sum(L), L the number of steps of an answer.
Our reading: an empty answer counts as one step.
"""

from __future__ import annotations

import dataclasses

from mmrl.advantages.baselines import Singleton, clear_flat_groups
from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


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
    return table.put(clear_flat_groups(table, groups, table.values - baseline, singleton))
