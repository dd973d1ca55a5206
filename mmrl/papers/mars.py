"""MARS (arXiv 2510.15414): the baseline of a player is the mean of its distinct returns.

Title: MARS: Reinforcing Multi-Agent Reasoning of LLMs through Self-Play in Strategic Games
Formula: A = R - mean of the distinct R of the player.
Our reading: values closer than 1e-8 are equal.
"""

from __future__ import annotations

import dataclasses

import torch

from mmrl.config.ranges import Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable
from mmrl.core.tensor import group_index


@advantage(turns=True)
def unique_center(table: RewardTable, *, by: Tags = ("group",)) -> RewardTable:
    """Subtract the mean of the group's different values, each counted once (MARS, arXiv 2510.15414).

    Equal values give 0. MARS compares the returns of one player: `by: [role]`.
    """
    groups = table.groups(by)
    flat = groups.values.div(EQUAL).round().long().transpose(1, 2)  # (N, K, R): closer than EQUAL is equal
    columns = []
    for values, valid in zip(flat.unbind(2), table.valid.unbind(1), strict=True):
        index = group_index([groups.index.flatten(), values.flatten()]).view(groups.index.shape)
        order = torch.arange(index.numel(), dtype=torch.float64).view(index.shape)[:, None]
        columns.append((GroupStatistics(order, valid[:, None], index).rank() == 0)[:, 0] & valid)
    once = torch.stack(columns, 1) if columns else table.valid
    mean = dataclasses.replace(groups, valid=once).mean()
    return table.put(torch.where(groups.flat(), 0.0, table.values - mean))
