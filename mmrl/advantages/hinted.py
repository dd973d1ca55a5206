"""Shared code of advantage functions for groups in which some rollouts saw a hint."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable

HINT, WROTE = "hint", "wrote"  # tags: the hint that an answer saw; the hint that a row is


def hint_of(table: RewardTable, tag: str = HINT) -> Tensor:
    """Hashed word of a hint tag of each row: (N,), 0 without the tag."""
    return table.ids[tag][:, 0] if tag in table.ids else torch.zeros(len(table), dtype=torch.int64)


def successes(table: RewardTable, of: str, threshold: float) -> Tensor:
    """Rows with a reward above a threshold: (N,) bool, False where the reward does not apply."""
    if not of and not set(table.names) <= set(table.scored):
        raise ValueError(
            "it compares the rewards as measured; put it before `total`, or name one reward in `of`"
        )
    return (table.at_end(of) if of else table.reward()) > threshold  # NaN is never above


def keep_rows(table: RewardTable, kept: Tensor) -> RewardTable:
    """Exclude the rows outside `kept` (N,) from statistics and from learning."""
    return table.replace(valid=table.valid & kept[:, None, None], learn=table.learn & kept[:, None])
