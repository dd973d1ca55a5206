"""Advantage functions that reduce several rewards to one."""

from __future__ import annotations

import torch

from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def total(table: RewardTable) -> RewardTable:
    """Sum the weighted rewards of every answer.

    A reward that does not apply adds nothing; where none applies, the total does not apply either.
    """
    summed = torch.where(table.valid, table.values, 0.0) * table.weights[None, :, None]
    return table.replace(
        values=summed.sum(1, keepdim=True),
        valid=table.valid.any(1, keepdim=True),
        names=("total",),
        weights=torch.ones(1, dtype=torch.float64),
    )


@advantage
def pick(table: RewardTable, *, of: str) -> RewardTable:
    """Use one reward as the advantage; the others are only reported as metrics."""
    if of not in table.names:
        raise ValueError(f"`pick` needs the reward '{of}', but the chain has {table.names}")
    place = table.names.index(of)
    return table.replace(
        values=table.values[:, place : place + 1],
        valid=table.valid[:, place : place + 1],
        names=(of,),
        weights=torch.ones(1, dtype=torch.float64),
    )
