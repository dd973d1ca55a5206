"""MARS2 (arXiv 2604.14564): shape the rewards of nodes in a tree of answers by parents and siblings.

Title: MARS2: Scaling Multi-Agent Tree Search via Reinforcement Learning for Code Generation
Formula: r' = r + gamma (r - (1 - lam) r_parent - lam mean r of the siblings).
Our reading: all nodes read the rewards as measured, where the code lets children see shaped parents.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import tagged_as
from mmrl.config.ranges import NonNegativeFloat, Probability, Tag
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


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
