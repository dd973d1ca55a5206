"""Advantage functions over the turns of conversations: comparisons of conversations, turns and states."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import tagged_as
from mmrl.advantages.select import returns
from mmrl.config.ranges import NonNegativeFloat, Probability, Tags, TagWords
from mmrl.config.registry import advantage as register
from mmrl.core.episodes import merge_turns, share_turns
from mmrl.core.reward_table import GroupStatistics, RewardTable, name_id
from mmrl.core.tensor import group_index


@register(turns=True)
def per_episode(
    table: RewardTable,
    *,
    advantage: tuple[Callable[[RewardTable], RewardTable], ...],
    by: Tags = (),
) -> RewardTable:
    """Apply advantage functions to whole conversations, and give all turns of one its advantage.

    Inside, a conversation is one answer and its reward the sum over its turns. Without any piece for turns
    in the chain this is done anyway; it is for chains that go on with single turns.

    Args:
        advantage: The functions, in order; they work on rows, not on steps.
        by: Tags that split a conversation into parts with advantages of their own, such as `role`; compare
            parts by them too (`by: [group, role]`).
    """
    merged, index = merge_turns(table, by)
    return share_turns(reduce(lambda made, function: function(made), advantage, merged), index, table)


@register(turns=True)
def for_turns(
    table: RewardTable,
    *,
    advantage: tuple[Callable[[RewardTable], RewardTable], ...],
    where: TagWords,
) -> RewardTable:
    """Apply advantage functions to the turns with a tag; the other turns count in nothing and stay.

    `for_some` does this for whole rows. Raises `ValueError` where the functions change rewards or places.

    Args:
        advantage: The functions, in order.
        where: Words by tag that a turn must have, such as `{stage: clue}`.
    """
    inside = table.present.clone()
    for tag, word in where.items():
        inside &= tagged_as(table, tag) == name_id(word)
    inside = inside[:, None]
    part = table.replace(valid=table.valid & inside)
    made = reduce(lambda made, function: function(made), advantage, part)
    if made.names != table.names or made.ends.shape != table.ends.shape:
        raise ValueError(
            f"`for_turns` must keep the rewards and places of its turns, but {made.names} came of "
            f"{table.names}; put `total` before it, and pieces that work on single steps after it"
        )
    return table.replace(
        values=torch.where(inside, made.values, table.values),
        valid=torch.where(inside, made.valid, table.valid),
        learn=torch.where(inside[:, 0], made.learn, table.learn),
    )


def away_from_mean(groups: GroupStatistics, scale: bool, eps: float, unbiased: bool = True) -> Tensor:
    """Subtract the group's mean, and divide by its deviation plus eps; equal values give exactly 0."""
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
    """Compare conversations, and turns that started from the same state (GiGPO, arXiv 2505.10978).

    A = (score - mean score) + omega (R_t - mean of R over the turns with the same state), where the score is
    the sum of a conversation's rewards and R_t = r_t + gamma R_(t+1). A state that was met again counts each
    time; a turn without a state is compared with none. Put it after `total`. With `same: [place]` turns of
    the same number are compared, as in MatchTIR (arXiv 2601.10712).

    Args:
        gamma: Discount of the next turn.
        omega: Weight of the comparison of turns.
        same: Tags that turns must share to be compared; engines tag the `state` that a turn starts from.
        scale: Divide both differences by the deviation of the group plus eps, or by nothing.
        count: The mean score counts a conversation once per turn, as the code does, or once (`episode`).
        eps: Added to the deviations.
        singleton: What stands for the comparison with a group of one conversation or turn: 0, or the score
            and the return themselves (`raw`; the code of GiGPO has it for conversations, MatchTIR's for
            turns).
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


@register(every_turn=True)
def shared_steps(
    table: RewardTable,
    *,
    of: Tags = ("state", "action"),
    history: bool = True,
    by: Tags = ("group",),
) -> RewardTable:
    """Give turns that several conversations of a group share the mean of their advantages (SALT).

    So a step that good and bad runs have in common gets little credit (arXiv 2510.20022, of which only the
    abstract was read; our reading). Put it after `{name: per_episode, advantage: [total, group_normalize]}`.

    Args:
        of: Tags that make a step: what was seen and what was done.
        history: Steps are the same where all steps before them are, too; else where the state after them is.
        by: Keys that define a group.
    """
    named = table.present.clone()
    for name in of:
        named &= tagged_as(table, name) != 0
    key = table.index((*by, *of))
    if history:
        columns, known = [], []
        for place in range(key.shape[1]):
            before = columns[-1] if columns else torch.zeros(len(key), dtype=torch.int64)
            columns.append(group_index([before, key[:, place]]))
            known.append(named[:, place] & (known[-1] if known else True))
        key = torch.stack(columns, 1) + torch.arange(key.shape[1]) * key.numel() if columns else key
        named = torch.stack(known, 1) if known else named
    else:
        state = table.ids[of[0]]
        following = torch.cat([state[:, 1:], torch.zeros_like(state[:, :1])], 1)
        key = group_index([key.flatten(), following.flatten()]).view(key.shape)
    groups = GroupStatistics(table.values, table.valid & named[:, None], key)
    return table.put(torch.where(groups.valid, groups.mean(), table.values))


@register(every_turn=True)
def turn_discount(table: RewardTable, *, gamma: Probability = 0.9) -> RewardTable:
    """Multiply rewards by gamma once for every turn of their conversation (VeRPO, arXiv 2601.03525).

    So of two conversations that solve a task the shorter one earns more. Put it before the rewards of turns
    are merged (`per_episode`). The paper's gamma is not known: 0.9 is our reading.
    """
    turns = table.present.sum(-1)[:, None, None].double()
    return table.put(table.values * gamma**turns)
