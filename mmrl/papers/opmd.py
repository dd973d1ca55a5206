"""OPMD (arXiv 2509.24203): the baseline is the log-mean-exp of the group's rewards.

Title: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths About GRPO and
Its Friends
Formula: A = (r - tau log mean exp(r / tau)) / (1 + tau).
Our reading: none.
"""

from __future__ import annotations

import dataclasses

import torch

from mmrl.advantages.baselines import Singleton, clear_flat_groups
from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import PositiveFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


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
    return table.put(clear_flat_groups(table, groups, away / (1 + tau), singleton))
