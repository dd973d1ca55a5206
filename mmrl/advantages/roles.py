"""Advantage functions for several roles or players over one policy, and for trees of answers."""

from __future__ import annotations

import dataclasses

import torch

from mmrl.advantages.notes import tagged_as
from mmrl.config.ranges import NonNegativeFloat, Probability, Tag, Tags
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


@advantage(turns=True)
def sibling_shape(
    table: RewardTable,
    *,
    gamma: NonNegativeFloat = 0.5,
    lam: Probability = 0.5,
    node: Tag = "node",
    parent: Tag = "parent",
) -> RewardTable:
    """Shape the rewards of a tree of answers by parents and siblings (MARS2, arXiv 2604.14564).

    r + gamma (r - b), where b is (1 - lam) times the parent's reward plus lam times the mean of the other
    siblings'; one of the two alone where the other is missing, nothing without both. All read the rewards as
    measured, where the code lets children see shaped parents. Put it after `total`, before `{name:
    group_normalize, by: [group], eps: 1e-9}`.

    Args:
        gamma: Strength; the function's default is 0.3, the recipe's 0.5.
        lam: Weight of siblings.
        node: Tag with the name of a node, different in every group.
        parent: Tag with the name of its parent; empty, or no node of the group, at the root.
    """
    above, own = tagged_as(table, parent), tagged_as(table, node)
    rows = list(zip(table.ids["group"].flatten().tolist(), own.flatten().tolist(), strict=True))
    places = {key: place for place, key in enumerate(rows) if key[1]}
    found = torch.tensor(
        [
            places.get((group, name), -1) if name else -1
            for (group, _), name in zip(rows, above.flatten().tolist(), strict=True)
        ],
        dtype=torch.int64,
    ).view(above.shape)
    rewards = table.values.transpose(1, 2).flatten(0, 1)  # (N K, R)
    valid = table.valid.transpose(1, 2).flatten(0, 1)
    has_parent = (found >= 0)[:, None]
    if rewards.numel():
        shape = (len(table), above.shape[1], -1)
        from_parent = rewards[found.clamp(min=0)].view(shape).transpose(1, 2)
        has_parent = has_parent & valid[found.clamp(min=0)].view(shape).transpose(1, 2)
    else:
        from_parent = table.values
    siblings = GroupStatistics(table.values, table.valid, table.index(("group", parent)))
    others = siblings.count() - 1
    mean = (siblings.sum() - table.values) / others.clamp(min=1)
    mixed = (1 - lam) * from_parent + lam * mean
    base = torch.where(
        has_parent & (others > 0),
        mixed,
        torch.where(has_parent, from_parent, torch.where(others > 0, mean, table.values)),
    )
    return table.put(torch.where(table.valid, table.values + gamma * (table.values - base), table.values))
