"""Advantage alignment (arXiv 2511.19405): players of a game also learn from each other's advantages.

Title: Learning Robust Social Strategies with Large Language Models
Formula: A_t + beta gamma (sum over k < t of gamma^(t - k) A_k) B_t, with B the other player's advantages.
Our reading: none in this file.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import tagged_as
from mmrl.config.ranges import Probability, Tag
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


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
