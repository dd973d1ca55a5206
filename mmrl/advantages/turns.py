"""Advantage functions over the turns of conversations: comparisons of conversations, turns and states."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import label, tagged_as
from mmrl.advantages.select import returns
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, Probability, Tag, Tags
from mmrl.config.registry import advantage as register
from mmrl.core.episodes import merge_turns, share_turns
from mmrl.core.reward_table import GroupStatistics, RewardTable
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


def _away(groups: GroupStatistics, scale: bool, eps: float, unbiased: bool = True) -> Tensor:
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
    overall = _away(GroupStatistics(score, known if count == "turn" else once, index), scale == "group", eps)
    alone = GroupStatistics(score, once, index).count() < 2
    overall = torch.where(alone, score if singleton == "raw" else 0.0, overall)
    later = returns(table, gamma=gamma).values
    named = torch.stack([torch.ones_like(table.present), *(table.ids[n] != 0 for n in same if n != "place")])
    turns = GroupStatistics(later, known & named.all(0)[:, None], table.index((*by, *same)))
    local = _away(turns, scale == "group", eps)
    local = torch.where(turns.count() < 2, later if singleton == "raw" else 0.0, local)
    credit = overall + omega * torch.where(turns.valid, local, 0.0)
    return table.replace(values=torch.where(known, credit, 0.0), valid=known)


@register(every_turn=True)
def history_groups(
    table: RewardTable,
    *,
    depth: NonNegativeInt = 2,
    gamma: Probability = 0.95,
    alpha: NonNegativeFloat = 1.0,
    weight_offset: NonNegativeInt = 1,
    scale: Literal["none", "group"] = "none",
    state: Tag = "state",
    by: Tags = ("group",),
) -> RewardTable:
    """Compare turns with the same recent states, at several depths (HGPO, arXiv 2602.22817).

    For k = 1 to depth + 1, a_k is the return of a turn less the mean over the turns of the group whose last k
    states are the same; A is the mean of those a_k that are not 0, weighted by (k + weight_offset)^alpha.
    Turns that nothing can be compared with have 0. Put it after `total`.

    Args:
        depth: Number of earlier states in the longest history (the paper: 2 or 4).
        gamma: Discount of the next turn.
        alpha: How much more long histories weigh.
        weight_offset: 1 as in the code, 0 as the paper numbers.
        scale: Divide by the deviation of the group (over its number), or by nothing.
        state: Tag of the state that a turn starts from.
        by: Keys that define a group.
    """
    named = tagged_as(table, state) != 0
    later = returns(table, gamma=gamma)
    context, known = table.index((*by, state)), table.present & named
    total, weights = torch.zeros_like(later.values), torch.zeros_like(later.values)
    for k in range(1, depth + 2):
        groups = GroupStatistics(later.values, later.valid & known[:, None], context)
        apart = torch.where(groups.valid, _away(groups, scale == "group", 1e-6, unbiased=False), 0.0)
        weight = torch.where(apart != 0, float(k + weight_offset) ** alpha, 0.0)
        total, weights = total + weight * apart, weights + weight
        # The last k + 1 states are those last k of this turn and of the one before.
        before = torch.cat([context[:, :1], context[:, :-1]], 1)
        context = group_index([context.flatten(), before.flatten()]).view(context.shape)
        known = known & torch.cat([torch.zeros_like(known[:, :1]), known[:, :-1]], 1)
    return later.put(total / (weights + 1e-6))


@register(every_turn=True)
def information_gain(table: RewardTable, *, of: str) -> RewardTable:
    """Reward a turn with the rise of the right answer's probability (IGPO, arXiv 2510.14967).

    r_t = p_(t+1) - p_t is added for all turns but the last; p_t is a label that the engine records for every
    turn (`at: every`), the probability of the right answer before the turn. A change that is not known is 0.
    Put it after `total`, before `returns` and `group_center`, which compares turns of the same number; the
    code compares tokens at the same position.
    """
    p = label(table, of)
    gain = torch.cat([p.diff(dim=-1), torch.zeros_like(p[..., :1])], -1).nan_to_num()
    final = (table.ids["place"] == table.last[:, None])[:, None]
    rewards = torch.where(table.valid, table.values, 0.0)
    known = table.valid.any(-1, keepdim=True) & table.present[:, None]
    return table.replace(values=torch.where(final, rewards, rewards + gain) * known, valid=known)


@register(every_turn=True)
def episode_mean(table: RewardTable, *, scale: Literal["div", "mul"] = "div") -> RewardTable:
    """Divide advantages by the number of turns of their conversation (GUI-Owl, arXiv 2508.15144).

    The paper scales the loss of a step by that number; our reading is to divide, so that long and short
    conversations weigh the same. `scale: mul` multiplies.
    """
    turns = table.present.sum(-1).clamp(min=1)[:, None, None].double()
    return table.put(table.values / turns if scale == "div" else table.values * turns)


@register(every_turn=True)
def share_among_turns(
    table: RewardTable, *, of: str, above: float = 0.5, largest: NonNegativeFloat = 1.0
) -> RewardTable:
    """Divide rewards of turns so that a conversation that was won earns 1 in all (meow-tea-taro).

    arXiv 2510.01132: by the number of its turns with a reward above 0 where it was won, otherwise by the
    largest sum that the task can pay, so that it earns less; by 1 at least. Rewards of turns are 0 or 1. Put
    it after `total`, before `returns`.

    Args:
        of: Name of the reward or label that says whether a conversation was won.
        above: It was won above this.
        largest: Largest sum of the rewards of turns in the task.
    """
    paid = (table.valid & (table.values > 0)).sum(-1, keepdim=True).double()
    success = (table.at_end(of) > above)[:, None, None]  # False for NaN
    return table.put(table.values / torch.where(success, paid, largest).clamp(min=1))


@register(every_turn=True)
def action_credit(
    table: RewardTable,
    *,
    of: str,
    action: Tag = "action",
    coef: NonNegativeFloat = 0.5,
    by: Tags = ("group",),
) -> RewardTable:
    """Add how much better an action was than others of its kind (MasHost's HRPO, arXiv 2506.08507).

    A + coef (a - mean of a over the group's actions of the same kind); nothing for a kind that was chosen
    once. Only the abstract was read: our reading, `coef` included.

    Args:
        of: Label with the reward a of an action, for every turn.
        action: Tag with the kind of the action.
        coef: Factor of the difference.
        by: Keys that define a group.
    """
    tagged_as(table, action)
    rated = label(table, of).expand_as(table.values)
    groups = GroupStatistics(rated, ~rated.isnan() & table.present[:, None], table.index((*by, action)))
    apart = torch.where(groups.valid, rated - groups.mean(), 0.0)
    return table.put(table.values + coef * apart)
