"""From several rewards to one."""

from __future__ import annotations

import torch

from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def total(table: RewardTable) -> RewardTable:
    """Add up the weighted rewards. One that does not apply adds nothing; where none applies, there is no
    total."""
    summed = torch.where(table.valid, table.values, 0.0) * table.weights[None, :, None]
    return table.replace(
        values=summed.sum(1, keepdim=True),
        valid=table.valid.any(1, keepdim=True),
        names=("total",),
        weights=torch.ones(1, dtype=torch.float64),
    )


@advantage
def pick(table: RewardTable, *, of: str) -> RewardTable:
    """Keep one reward, and leave the others to metrics."""
    if of not in table.names:
        raise ValueError(f"`pick` wants the reward '{of}', but the chain holds {table.names}")
    place = table.names.index(of)
    return table.replace(
        values=table.values[:, place : place + 1],
        valid=table.valid[:, place : place + 1],
        names=(of,),
        weights=torch.ones(1, dtype=torch.float64),
    )
