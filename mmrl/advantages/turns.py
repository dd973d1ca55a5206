"""Advantage functions that compare whole conversations, or turns that start in the same state."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import tagged_as
from mmrl.advantages.select import returns
from mmrl.config.ranges import NonNegativeFloat, Probability, Tags
from mmrl.config.registry import advantage as register
from mmrl.core.episodes import merge_turns, share_turns
from mmrl.core.reward_table import GroupStatistics, RewardTable


@register(turns=True)
def per_episode(
    table: RewardTable,
    *,
    advantage: tuple[Callable[[RewardTable], RewardTable], ...],
    by: Tags = (),
) -> RewardTable:
    """Apply advantage functions to whole conversations; all turns get their conversation's advantage.

    The functions get a conversation as one answer with the sum of its rewards. A run without functions for
    turns does this anyway; use `per_episode` if later functions work on single turns.

    Args:
        advantage: The functions, in order; they work on rows, not on steps.
        by: Tags that split a conversation into parts with their own advantages, such as `role`; then compare
            by these tags too (`by: [group, role]`).
    """
    merged, index = merge_turns(table, by)
    return share_turns(reduce(lambda changed, function: function(changed), advantage, merged), index, table)


def away_from_mean(groups: GroupStatistics, scale: bool, eps: float, unbiased: bool = True) -> Tensor:
    """Subtract the group mean; with `scale`, divide by standard deviation + eps. Equal values give 0."""
    away = groups.values - groups.mean()
    away = away / (groups.std(unbiased) + eps) if scale else away
    return torch.where(groups.flat(), 0.0, away)


@register(every_turn=True)
def gigpo(
    table: RewardTable,
    *,
    gamma: Probability = 0.95,
    omega: NonNegativeFloat = 1.0,
    same: Tags = ("state",),
    scale: Literal["none", "group"] = "none",
    count: Literal["turn", "episode"] = "turn",
    eps: NonNegativeFloat = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
    by: Tags = ("group",),
) -> RewardTable:
    """Compare conversations of a group, and turns that start in the same state (GiGPO, arXiv 2505.10978).

    A = (score - mean score) + omega (R_t - mean of R over the turns with the same state), where the score is
    the sum of rewards of a conversation and R_t = r_t + gamma R_(t+1). A state that recurs counts each
    time; turns without a state have no second term. Put it after `total`. `same: [place]` compares turns with
    the same index in their conversations, as in MatchTIR (arXiv 2601.10712).

    Args:
        gamma: Discount of the next turn.
        omega: Weight of the comparison of turns.
        same: Tags that turns must share to be compared; engines tag the `state` at the start of a turn.
        scale: `none`: as above. `group`: divide both differences by the group's standard deviation plus eps.
        count: Weight of a conversation in the mean score. `turn`: its number of turns, as in the code.
            `episode`: 1.
        eps: Added to the standard deviations.
        singleton: Result of a group of one conversation or turn. `zero`: 0. `raw`: the score or the return
            itself (the code of GiGPO for conversations, MatchTIR's for turns).
        by: Keys that define a group.
    """
    unknown = [name for name in same if name != "place" and name not in table.ids]
    if unknown:
        tagged_as(table, unknown[0])
    rewards = torch.where(table.valid, table.values, 0.0)
    score = rewards.sum(-1, keepdim=True).expand_as(rewards)
    known = table.valid.any(-1, keepdim=True) & table.present[:, None]  # (N, R, K)
    once = known & (table.ids["place"] == table.last[:, None])[:, None]
    index = table.index(by)
    overall = away_from_mean(
        GroupStatistics(score, known if count == "turn" else once, index), scale == "group", eps
    )
    alone = GroupStatistics(score, once, index).count() < 2
    overall = torch.where(alone, score if singleton == "raw" else 0.0, overall)
    later = returns(table, gamma=gamma).values
    named = torch.stack([torch.ones_like(table.present), *(table.ids[n] != 0 for n in same if n != "place")])
    turns = GroupStatistics(later, known & named.all(0)[:, None], table.index((*by, *same)))
    local = away_from_mean(turns, scale == "group", eps)
    local = torch.where(turns.count() < 2, later if singleton == "raw" else 0.0, local)
    credit = overall + omega * torch.where(turns.valid, local, 0.0)
    return table.replace(values=torch.where(known, credit, 0.0), valid=known)
