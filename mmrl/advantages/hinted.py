"""Shared code of advantage functions for groups in which some rollouts saw a hint."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable

HINT, WROTE = "hint", "wrote"  # tags: an answer with a hint; a row that is a hint


def hint_of(table: RewardTable, tag: str = HINT) -> Tensor:
    """Return the hashed value of a hint tag for each row: (N,), 0 without the tag."""
    return table.ids[tag][:, 0] if tag in table.ids else torch.zeros(len(table), dtype=torch.int64)


def successes(table: RewardTable, of: str, threshold: float) -> Tensor:
    """Whether the reward of each row is above a threshold: (N,) bool, False if it does not apply."""
    if not of and not set(table.names) <= set(table.scored):
        raise ValueError(
            "it compares the rewards as measured; put it before `total`, or name one reward in `of`"
        )
    return (table.at_end(of) if of else table.reward()) > threshold  # NaN is never above


def keep_rows(table: RewardTable, kept: Tensor) -> RewardTable:
    """Exclude the rows outside `kept` (N,) from statistics and from learning."""
    return table.replace(valid=table.valid & kept[:, None, None], learn=table.learn & kept[:, None])
