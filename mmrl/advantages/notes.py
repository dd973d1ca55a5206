"""What the engine noted on steps, laid out for advantage functions."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable
from mmrl.core.tensor import group_index, pad_to


def row_mean(table: RewardTable, name: str) -> Tensor:
    """Average a note over the steps of each row: (N,), NaN where nothing was noted."""
    return table.notes[name].nanmean(-1)


def noted(table: RewardTable, name: str) -> Tensor:
    """Lay a note out over the places of a table that went through `per_step`: (N, T), NaN beyond it."""
    # Notes keep the width of the longest row that was collected, which may have been dropped since.
    steps = table.ends.shape[1]
    return pad_to(table.notes[name], steps, 1, torch.nan)[:, :steps]


def label(table: RewardTable, name: str) -> Tensor:
    """Find a reward or label as measured: (N, 1, K), NaN where it does not apply.

    Raises `ValueError` where there is none of that name.
    """
    if name not in table.scored:
        raise ValueError(f"no reward is called '{name}'; there are {', '.join(table.scored) or 'none'}")
    return table.scored[name][:, None]


def clusters(table: RewardTable, of: str, index: Tensor) -> Tensor:
    """Number the clusters of answers within the groups of `index` (N, K): (N, K).

    `of` is a label that is equal for answers of one cluster; an answer without it is a cluster of its own.
    """
    number = label(table, of)[:, 0] + 0.0  # no -0.0, whose bits differ from those of 0.0
    alone = torch.where(number.isnan(), torch.arange(1, number.numel() + 1).view(number.shape), 0)
    bits = number.nan_to_num().view(torch.int64)  # equal where the numbers are, which no rounding changes
    return group_index([column.flatten() for column in (index, bits, alone)]).view(index.shape)


def tagged_as(table: RewardTable, tag: str) -> Tensor:
    """Return the hashed words of a tag: (N, K), 0 where there is none.

    Raises `ValueError` where no outcome has the tag.
    """
    return table.tag(tag)
