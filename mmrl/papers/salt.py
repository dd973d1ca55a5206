"""SALT (arXiv 2510.20022): steps shared by conversations of a prompt get their mean advantage.

Title: SALT: Step-level Advantage Assignment for Long-horizon Agents via Trajectory Graph
Formula: A(step) = mean of A over the conversations of the group that share the step.
Our reading: the definition of equal steps, and the plain mean; only the abstract was read.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import tagged_as
from mmrl.config.ranges import Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.tensor import group_index


@advantage(every_turn=True)
def shared_steps(
    table: RewardTable,
    *,
    of: Tags = ("state", "action"),
    history: bool = True,
    by: Tags = ("group",),
) -> RewardTable:
    """Give turns that several conversations of a group share the mean of their advantages (SALT).

    So a step that good and bad runs have in common gets little credit (arXiv 2510.20022, of which only the
    abstract was read; our reading). Put it after `{name: per_episode, advantage: [total, group_normalize]}`.

    Args:
        of: Tags that make a step: what was seen and what was done.
        history: Steps are the same where all steps before them are, too; else where the state after them is.
        by: Keys that define a group.
    """
    named = table.present.clone()
    for name in of:
        named &= tagged_as(table, name) != 0
    key = table.index((*by, *of))
    if history:
        columns, known = [], []
        for place in range(key.shape[1]):
            before = columns[-1] if columns else torch.zeros(len(key), dtype=torch.int64)
            columns.append(group_index([before, key[:, place]]))
            known.append(named[:, place] & (known[-1] if known else True))
        key = torch.stack(columns, 1) + torch.arange(key.shape[1]) * key.numel() if columns else key
        named = torch.stack(known, 1) if known else named
    else:
        state = table.ids[of[0]]
        following = torch.cat([state[:, 1:], torch.zeros_like(state[:, :1])], 1)
        key = group_index([key.flatten(), following.flatten()]).view(key.shape)
    groups = GroupStatistics(table.values, table.valid & named[:, None], key)
    return table.put(torch.where(groups.valid, groups.mean(), table.values))
