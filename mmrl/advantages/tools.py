"""Advantage functions that read how often tools were called, and what was found on the way."""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.advantages.shape import column_of
from mmrl.config.ranges import NonNegativeFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable, name_id


@advantage
def partial_credit(
    table: RewardTable,
    *,
    of: str,
    found: str,
    alpha: NonNegativeFloat = 0.3,
    threshold: float = 0.5,
    unless: str = "",
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Give wrong answers a share of a reward for what they found (E-GRPO, arXiv 2510.24694).

    A wrong answer earns alpha g / (largest g of the group), 0 where nobody found anything. One that was cut
    at the length limit earns 0. Put it before `total`.

    Args:
        of: Name of the reward that right answers keep.
        found: Label g between 0 and 1, such as `entity_match` of weight 0.
        alpha: Reward of a wrong answer that found as much as any (0.3 is unverified).
        threshold: An answer is right above this reward.
        unless: Label that is 0 for answers of a bad format, which earn 0; empty: none.
        by: Keys that define a group.
    """
    column = column_of(table, of)
    share, value = label(table, found), table.values[:, column]
    groups = GroupStatistics(share, ~share.isnan(), table.index(by))
    most = groups.largest()
    partial = torch.where(
        groups.valid & (most > EQUAL), alpha * share.nan_to_num() / most.clamp(min=EQUAL), 0.0
    )
    earned = torch.where(value > threshold, value, partial[:, 0])
    if unless:
        earned = torch.where(label(table, unless)[:, 0] == 0, 0.0, earned)
    if "finish" in table.ids:
        earned = torch.where(table.ids["finish"] == name_id("length"), 0.0, earned)
    values = table.values.clone()
    values[:, column] = torch.where(table.valid[:, column], earned, value)
    return table.put(values)
