"""CANON (arXiv 2509.23962): compare answers of high and of low entropy with each other's mean reward.

Title: Conditional Advantage Estimation for Reinforcement Learning in Large Reasoning Models
Formula: A = mu (r - mean of the other half) + (1 - mu) (r - mean of the own half).
Our reading: groups of one have advantage 0, and equal rewards too where a is 1 and b is 0.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import row_mean
from mmrl.config.ranges import Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


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
