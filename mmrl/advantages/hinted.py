"""Shared code of advantage functions for groups in which some rollouts saw a hint."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable

HINT, WROTE = "hint", "wrote"  # tags of answers sampled with a hint, and of answers that are hints


def hint_of(table: RewardTable, tag: str = HINT) -> Tensor:
    """Return the hash of each row's hint tag: (N,) for N rows, 0 for a row without the tag."""
    return table.ids[tag][:, 0] if tag in table.ids else torch.zeros(len(table), dtype=torch.int64)


def successes(table: RewardTable, of: str, threshold: float) -> Tensor:
    """Whether the reward of each row exceeds `threshold`: (N,) bool, False if the reward does not apply."""
    if not of and not set(table.names) <= set(table.scored):
        raise ValueError(
            "it compares the rewards as measured; put it before `total`, or name one reward in `of`"
        )
    return (table.at_end(of) if of else table.reward()) > threshold  # NaN is never above


def keep_rows(table: RewardTable, kept: Tensor) -> RewardTable:
    """Exclude the rows where `kept` (N,) is False from statistics and from learning."""
    return table.replace(valid=table.valid & kept[:, None, None], learn=table.learn & kept[:, None])
