"""Advantage functions that read the values of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.notes import first_noted, holes, noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable, name_id


def _errors(table: RewardTable, against: str, gamma: float, bootstrap: bool) -> tuple[RewardTable, Tensor]:
    """Compute TD errors r_t + gamma V_(t+1) - V_t (N, R, T); also return the `per_step` table.

    The reward of an outcome belongs to its last step. Steps without a value (holes) are moved to the end with
    error 0; `_put_back` restores the order.
    """
    steps = per_step(table)
    value = noted(steps, f"{against}/value")  # (N, T)
    known = steps.present & ~value.isnan()
    value = value.gather(1, _known_first(known)).nan_to_num()
    count = known.sum(-1, keepdim=True)  # (N, 1)
    place = torch.arange(value.shape[1]).expand_as(value)
    rewards = table.values.new_zeros(len(table), len(table.names), value.shape[1])
    if value.shape[1]:
        given = torch.where(table.valid, table.values, 0.0)
        ends = (table.ends - 1).clamp(0, value.shape[1] - 1)
        # Index of the last step with a value before each outcome's end.
        last = (known.cumsum(-1).gather(1, ends) - 1).clamp(min=0)
        rewards = rewards.scatter_add(2, last[:, None].expand_as(given), given)
    after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
    after = torch.where(place < count - 1, after, 0.0)  # no value after the last step
    if bootstrap and "finish" in table.ids:
        cut = (table.ids["finish"] == name_id("length")).any(-1, keepdim=True)
        after = torch.where(cut & (place == count - 1), value, after)
    errors = rewards + (gamma * after - value)[:, None]
    return steps, torch.where((place < count)[:, None], errors, 0.0)


def _known_first(known: Tensor) -> Tensor:
    """Return the order (N, T) that moves the steps with a value to the front of each row."""
    return (~known).long().sort(dim=-1, stable=True).indices


def _put_back(steps: RewardTable, against: str, values: Tensor) -> RewardTable:
    """Undo `_known_first`: move values (N, R, T) back to the positions of their steps.

    Steps without a value of the critic get no advantage."""
    known = (steps.present & ~noted(steps, f"{against}/value").isnan())[:, None]
    back = _known_first(known[:, 0]).argsort(-1)
    values = values.gather(2, back[:, None].expand_as(values))
    return steps.replace(values=torch.where(known, values, 0.0), valid=steps.valid & known)


def discounted(errors: Tensor, discount: float) -> Tensor:
    """Compute the discounted sum from every step to the end: S_t = e_t + discount S_(t+1)."""
    carried, summed = torch.zeros_like(errors[..., 0]) if errors.shape[-1] else errors.sum(-1), []
    for place in reversed(range(errors.shape[-1])):
        carried = errors[..., place] + discount * carried
        summed.append(carried)
    return torch.stack(summed[::-1], -1) if summed else errors


@advantage(turns=True, of_others={"value"})
def gae(
    table: RewardTable,
    *,
    gamma: Probability = 1.0,
    lam: Probability = 0.95,
    bootstrap: bool = False,
    against: str = "critic",
) -> RewardTable:
    """Compute generalised advantages of every step from the values of a critic (GAE, arXiv 1506.02438).

    A_t = sum over k of (gamma lam)^k e_(t+k), with e_t = r_t + gamma V_(t+1) - V_t; the value after the last
    step is 0, and the reward of an outcome belongs to its last step. Put it after `total`, often with
    `batch_normalize` after it, as in PPO.

    Args:
        gamma: Discount of later rewards.
        lam: Discount of later errors e. 0: only e_t. 1: all rewards to the end, minus the value.
        bootstrap: After an answer that was cut at the length limit, use the value of its last step instead of
            0 (extended GAE of T-PPO, arXiv 2506.15050).
        against: Name of the critic in `references`.
    """
    steps, errors = _errors(table, against, gamma, bootstrap)
    return _put_back(steps, against, discounted(errors, gamma * lam))


@advantage(turns=True, of_others={"value"})
def lambda_returns(
    table: RewardTable,
    *,
    gamma: Probability = 1.0,
    lam: Probability = 0.95,
    bootstrap: bool = False,
    against: str = "critic",
) -> RewardTable:
    """Compute the target of a critic at every step: `gae` plus the value of the critic.

    Args:
        gamma: Discount of later rewards.
        lam: As in `gae`; 1 is the sum of rewards (Monte Carlo).
        bootstrap: As in `gae`.
        against: Name of the critic in `references`.
    """
    steps, errors = _errors(table, against, gamma, bootstrap)
    value = noted(steps, f"{against}/value").nan_to_num()[:, None]
    advantages = _put_back(steps, against, discounted(errors, gamma * lam))
    return advantages.put(advantages.values + value)


@advantage(of_others={"value"})
def value_baseline(table: RewardTable, *, against: str = "critic") -> RewardTable:
    """Subtract a critic's value of the prompt, which is the first value of the row.

    One rollout per prompt is enough; groups of equal rewards have an advantage too.
    """
    value = first_noted(table, f"{against}/value").nan_to_num()  # (N, 1)
    return table.put(torch.where(table.valid, table.values - value[:, None], table.values))


@advantage(of_others={"value"})
def value_label(table: RewardTable, *, against: str = "critic", label: str = "predicted") -> RewardTable:
    """Add a critic's value of the prompt as a label, which `shrunk_mean` (V_0.5) can read.

    Args:
        against: Name of the critic in `references`.
        label: Name of the label.
    """
    value = first_noted(table, f"{against}/value").expand(table.ends.shape)
    return table.replace(scored={**table.scored, label: torch.where(table.present, value, torch.nan)})


@advantage
def value_targets(table: RewardTable) -> RewardTable:
    """Set the critic's target at the step after each prefix to the prefix's reward; drop all other steps.

    The reward of a prefix is the mean reward of its completions by `vision.with_prefix_rollouts`, the target
    of a verifier (PAV, arXiv 2410.08146). A row without prefixes has the reward of its answer at the first
    step (V_0, arXiv 2602.03584). A step that the policy did not choose passes its target to the next step.
    The result is (N, R, T).
    """
    steps = per_step(table)
    width = steps.ends.shape[1]
    if not width:
        return steps
    answer = torch.arange(table.ends.shape[1]) == table.last[:, None]
    prefix = table.present & ~answer
    alone = answer & ~prefix.any(-1, keepdim=True)
    at = torch.where(alone, 0, table.ends)
    chosen = torch.where(steps.present & ~holes(table, width), torch.arange(width), width)
    following = chosen.flip(-1).cummin(-1).values.flip(-1)  # the next chosen step, or `width` without one
    at = torch.where(at < width, following.gather(1, at.clamp(0, width - 1)), width)
    known = table.valid & ((prefix | alone) & (at < width))[:, None]
    slot = at.clamp(max=width - 1)[:, None].expand_as(known)
    empty = table.values.new_zeros(len(table), len(table.names), width)
    count = empty.scatter_add(2, slot, known.to(empty))
    values = empty.scatter_add(2, slot, torch.where(known, table.values, 0.0)) / count.clamp(min=1)
    return steps.replace(values=values, valid=count > 0, learn=steps.learn & (count > 0).any(1))
