"""A-GRAE (arXiv 2602.05548): easy groups and wrong answers weigh more early in training.

Title: Unveiling Implicit Advantage Symmetry: Why GRPO Struggles with Exploration and Difficulty Adaptation
Formula: A' = A ((1 - P) / 2 / (1 - sqrt(p)) + P / 2 / sqrt(p)), times min(1, P / alpha) above 0; p a
group's mean success, P that of all.
Our reading: the weights act at every step, where the code compares a scheduled weight with a constant.
"""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.config.ranges import PositiveFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable


@advantage
def asymmetric_difficulty(
    table: RewardTable,
    *,
    of: str,
    alpha: PositiveFloat = 1.0,
    by: Tags = BY_GROUP,
    eps: PositiveFloat = 1e-6,
) -> RewardTable:
    """Stress easy groups early and hard ones late, and wrong answers early (A-GRAE, arXiv 2602.05548).

    With p the mean reward of the group and P the mean of all p, an advantage A becomes
    A ((1 - P) / 2 / (1 - sqrt(p) + eps) + P / 2 / (sqrt(p) + eps)); what is above 0 is then multiplied by
    min(1, P / alpha). Raises `ValueError` for means outside 0 to 1. Our reading: it acts at every step,
    where the code compares a scheduled weight with a constant.

    Args:
        of: Name of the reward that counts as success, between 0 and 1.
        alpha: Mean success from which right answers count in full (0.5 for geometry and medical images).
        by: Keys that define a group.
        eps: Added to both divisors.
    """
    success = label(table, of)
    known = ~success.isnan()
    groups = GroupStatistics(success, known, table.index(by))
    p = groups.mean()
    if known.any() and not (p.min() >= -EQUAL and p.max() <= 1 + EQUAL):
        span = f"{p.min().item():g} to {p.max().item():g}"
        raise ValueError(f"'{of}' must be a success between 0 and 1; the means of groups go from {span}")
    p = p.clamp(0, 1)
    share = torch.where(known, 1 / groups.count().clamp(min=1), 0.0)  # every group counts once
    progress = (share * p).sum() / share.sum().clamp(min=1)
    root = p.sqrt()
    weight = 0.5 * ((1 - progress) / (1 - root + eps) + progress / (root + eps))
    rising = (progress / alpha).clamp(max=1)
    credit = table.values * weight
    return table.put(torch.where(credit > 0, credit * rising, credit))
