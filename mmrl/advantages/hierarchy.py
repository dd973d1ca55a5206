"""Hierarchical advantages of conversations in which a plan is made and followed."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.notes import noted, tagged_as
from mmrl.advantages.select import per_step
from mmrl.config.ranges import Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable, name_id


@advantage(turns=True, others={"planner"}, of_others={"value"})
def hae(
    table: RewardTable,
    *,
    gamma: Probability = 0.99,
    lam: Probability = 0.95,
    lam_segment: Probability = 0.95,
    against: str = "critic",
) -> RewardTable:
    """Compute advantages of plans and of the actions that follow them (HAE of HiPER, arXiv 2602.16165).

    An outcome with the tag `part: plan` begins a segment, others are actions. An action has e_t + gamma lam
    A_(t+1) inside its segment, with e_t = r_t + gamma V_next - V_t, where V_next at its end is the value of
    the next plan; a plan has E_k + gamma^d lam_segment A_(k+1), with E_k = R_k + gamma^d W_next - W_k, where
    R_k is the discounted reward of its segment of d actions and W the value of a plan. Values are those
    before the first token of an outcome; after the last one they are 0. Put it after `total`. Departs: a
    decision to keep the plan has no third critic.

    Args:
        gamma: Discount of an action.
        lam: Discount of later errors inside a segment.
        lam_segment: Discount of the errors of later segments.
        against: Name in `references` of the critic of actions; that of plans is called `planner`.
    """
    plan = table.present & (tagged_as(table, "part") == name_id("plan"))
    steps = per_step(table)
    start = torch.cat([torch.zeros_like(table.ends[:, :1]), table.ends[:, :-1]], 1).clamp(min=0)
    start = start.clamp(max=max(steps.ends.shape[1] - 1, 0))
    values = [
        _from_each(noted(steps, f"{name}/value")).gather(1, start) if steps.ends.shape[1] else start.double()
        for name in (against, "planner")
    ]
    low, high = (value[:, None] for value in values)  # (N, 1, K)
    rewards = torch.where(table.valid, table.values, 0.0)
    zero = torch.zeros_like(rewards[..., 0]) if rewards.shape[-1] else rewards.sum(-1)
    # Carried from later places: the value and advantage that follow an action, the reward and discount of
    # the segment, and the value and advantage of the next plan.
    value, lead, summed, discount, next_value, next_lead = zero, zero, zero, zero + 1, zero, zero
    found = []
    for place in reversed(range(rewards.shape[-1])):
        here, there = plan[:, None, place], table.present[:, None, place]
        reward, action = rewards[..., place], there & ~here
        acted = reward + gamma * value - low[..., place] + gamma * lam * lead
        total = reward + summed
        planned = total + discount * next_value - high[..., place] + discount * lam_segment * next_lead
        found.append(torch.where(here, planned, torch.where(action, acted, 0.0)))
        value = torch.where(here, high[..., place], torch.where(action, low[..., place], value))
        lead = torch.where(here, 0.0, torch.where(action, acted, lead))
        next_value = torch.where(here, high[..., place], next_value)
        next_lead = torch.where(here, planned, next_lead)
        summed = torch.where(here, 0.0, torch.where(action, reward + gamma * summed, summed))
        discount = torch.where(here, 1.0, torch.where(action, gamma * discount, discount))
    known = table.valid.any(-1, keepdim=True) & table.present[:, None]
    values = torch.stack(found[::-1], -1) if found else rewards
    return table.replace(values=torch.where(known, values, 0.0), valid=known)


def _from_each(values: Tensor) -> Tensor:
    """Give steps without a value (N, T) that of the next one with a value; 0 where none follows."""
    back = values.flip(-1)
    places = torch.arange(back.shape[1]).expand_as(back)
    latest = torch.where(back.isnan(), -1, places).cummax(-1).values.clamp(min=0)
    return back.gather(1, latest).nan_to_num().flip(-1)
