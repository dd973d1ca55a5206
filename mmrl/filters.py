"""Group filters for dynamic sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.registry import group_filter
from mmrl.core.reward_table import EQUAL, RewardTable
from mmrl.core.tensor import group_count, group_extreme, group_index, group_range


@group_filter
def keep_all(table: RewardTable) -> Tensor:
    """Keep every group."""
    return torch.ones(len(table), dtype=torch.bool)


@group_filter
def varied(table: RewardTable, *, of: str = "") -> Tensor:
    """Keep groups whose rewards differ (DAPO's dynamic sampling, arXiv 2503.14476).

    Groups of one row are kept. `of` is the reward that must differ; by default the weighted sum of rewards.
    """
    if not len(table):
        return torch.ones(0, dtype=torch.bool)
    reward = table.at_end(of) if of else table.reward()
    index, valid = group_index([table.group]), ~reward.isnan()
    extent = group_range(reward, index, valid)
    # Groups without any reward (range -inf) are dropped, unless they are a single row.
    return (extent > EQUAL) | (group_count(index, torch.ones_like(valid)) < 2)


@group_filter
def not_all_right(table: RewardTable, *, of: str = "", max_reward: float = 1.0) -> Tensor:
    """Drop groups whose answers all earned `max_reward`; all-wrong groups stay (NGRPO's filter).

    The filter is meant for `virtual_maximum`, which learns from all-wrong groups. `of` is the name of the
    reward; by default the weighted sum of rewards. Groups without any reward are dropped.
    """
    if not len(table):
        return torch.ones(0, dtype=torch.bool)
    reward = table.at_end(of) if of else table.reward()
    smallest = group_extreme(reward, group_index([table.group]), ~reward.isnan(), largest=False)
    return smallest < max_reward - EQUAL  # False for a group without any reward: `smallest` is inf
