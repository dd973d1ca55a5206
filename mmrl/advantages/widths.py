"""Advantage functions that note how far each step's ratio may move, for the surrogate `elastic_clip`."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable


def _widths(table: RewardTable, low: Tensor, high: Tensor) -> RewardTable:
    """Note factors of the lower and upper clip range: (N, T) each, 1 beyond a row's steps."""
    low, high = (torch.where(table.present, factor, 1.0) for factor in (low, high))
    return table.note("clip_low", low).note("clip_high", high)
