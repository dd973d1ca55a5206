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
def alignment(
    table: RewardTable,
    *,
    beta: float = 2.0,
    gamma: Probability = 0.96,
    discounted: bool = False,
    role: Tag = "role",
) -> RewardTable:
    """Shape each player's advantage by the other's (advantage alignment, arXiv 2511.19405).

    A_t + beta w_t B_t, with w_t = gamma sum over k < t of gamma^(t - k) A_k, where A are the advantages of a
    player and B those of the other at the player's t-th turn. The outer gamma is that of the code. Put it
    after `{name: returns, by: [role], gamma: 0.96}` and `{name: leave_one_out, by: [group, role, turn]}`,
    over games of the same start. Raises `ValueError` for more than two players.

    Args:
        beta: Weight of the alignment; 0 leaves the advantages as they are.
        gamma: Discount of a turn.
        discounted: Multiply the result by gamma^t.
        role: Tag of the player.
    """
    player, present = tagged_as(table, role), table.present
    both = present[:, :, None] & present[:, None]
    same = both & (player[:, :, None] == player[:, None])  # (N, K, K)
    earlier = same & torch.ones(same.shape[1:], dtype=torch.bool).tril(-1)
    turn = earlier.sum(-1)  # (N, K): number of the player's own turn
    other = both & ~same & (turn[:, :, None] == turn[:, None])
    if (other.sum(-1) > 1).any():
        raise ValueError(f"`alignment` is for two players, but a game has more by the tag '{role}'")
    values = torch.where(table.valid, table.values, 0.0)
    decay = torch.where(earlier, gamma ** (turn[:, :, None] - turn[:, None]).clamp(min=0).double(), 0.0)
    weight = gamma * torch.einsum("nkj,nrj->nrk", decay, values)
    theirs = torch.einsum("nkj,nrj->nrk", other.double(), values)
    credit = values + beta * weight * theirs
    return table.put(credit * gamma ** turn[:, None].double() if discounted else credit)


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
