"""MasHost's HRPO (arXiv 2506.08507): compare actions of the same kind within a group.

Title: MasHost Builds It All: Autonomous Multi-Agent System Directed by Reinforcement Learning
Formula: A' = A + coef (a - mean of a over the group's actions of the same kind).
Our reading: everything including `coef`, since only the abstract was read.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import label, tagged_as
from mmrl.config.ranges import NonNegativeFloat, Tag, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


@advantage(every_turn=True)
def action_credit(
    table: RewardTable,
    *,
    of: str,
    action: Tag = "action",
    coef: NonNegativeFloat = 0.5,
    by: Tags = ("group",),
) -> RewardTable:
    """Add how much better an action was than others of its kind (MasHost's HRPO, arXiv 2506.08507).

    A + coef (a - mean of a over the group's actions of the same kind); nothing for a kind that was chosen
    once. Only the abstract was read: our reading, `coef` included.

    Args:
        of: Label with the reward a of an action, for every turn.
        action: Tag with the kind of the action.
        coef: Factor of the difference.
        by: Keys that define a group.
    """
    tagged_as(table, action)
    rated = label(table, of).expand_as(table.values)
    groups = GroupStatistics(rated, ~rated.isnan() & table.present[:, None], table.index((*by, action)))
    apart = torch.where(groups.valid, rated - groups.mean(), 0.0)
    return table.put(table.values + coef * apart)
