"""Advantage functions that combine rewards, and that turn rewards of steps into returns."""

from __future__ import annotations

import torch

from mmrl.config.ranges import NonNegativeInt
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


@advantage
def value_weights(table: RewardTable) -> RewardTable:
    """Record each entry's value, and its value over the mean of its row (VGPO, arXiv 2512.12387).

    The labels are `value` and `value_weight`; the values themselves stay. Our reading: weights are 1 where
    that mean is not above 1e-6, so no sign is flipped. Several rewards are added up, as `total` would.
    """
    known = table.valid.any(1)
    value = (torch.where(table.valid, table.values, 0.0) * table.weights[None, :, None]).sum(1)
    mean = torch.where(known, value, 0.0).sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
    weight = torch.where(mean > 1e-6, value / mean.clamp(min=1e-6), 1.0)
    labels = {"value": value, "value_weight": weight}
    labels = {name: torch.where(known, column, torch.nan) for name, column in labels.items()}
    return table.replace(scored={**table.scored, **labels})


@advantage
def value_anchor(
    table: RewardTable, *, of: str = "value", k: float = 0.1, steps: NonNegativeInt = 5
) -> RewardTable:
    """Add `k` times a label to the advantage of the first `steps` steps (VGPO, arXiv 2512.12387).

    So a group whose rewards are all equal still learns. Our reading of a mixing weight k std(Q) times Q /
    std(Q), which is 0 / 0 exactly in that case.

    Args:
        of: Name of the label, as `value_weights` records it.
        k: Weight of the label.
        steps: Number of steps from the start of the row to which it is added.
    """
    if of not in table.scored:
        raise ValueError(
            f"`value_anchor` adds the label '{of}', but there are only {', '.join(table.scored)}; put "
            "`value_weights` before it"
        )
    early = table.present & (table.ends <= steps)
    anchor = torch.where(early, table.scored[of].nan_to_num(), 0.0)
    return table.put(table.values + k * anchor[:, None])
