"""HiPER (arXiv 2602.16165): separate advantages for plans, actions, and decisions to keep a plan.

Title: HiPER: Hierarchical Reinforcement Learning with Explicit Credit Assignment for Large Language Model
Agents
Formula: A_t = e_t + gamma lam A_(t+1), e_t = r_t + gamma V_next - V_t; plans: A_k = E_k + gamma^d
lam_segment A_(k+1).
Our reading: a decision takes no time, and a reward on it counts for it alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.notes import next_noted, noted, tagged_as
from mmrl.advantages.select import per_step
from mmrl.config.ranges import Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable, name_id


@advantage(turns=True, tags={"part"}, others={"planner"}, of_others={"value"})
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
    before the first token of an outcome; after the last one they are 0. Put it after `total`. Where a
    conversation also decides whether to keep its plan, use `hae_with_switches`.

    Args:
        gamma: Discount of an action.
        lam: Discount of later errors inside a segment.
        lam_segment: Discount of the errors of later segments.
        against: Name in `references` of the critic of actions; that of plans is called `planner`.
    """
    names = (against, "planner")
    return _hierarchical(table, names, gamma, lam, lam_segment, torch.zeros_like(table.present))


@advantage(turns=True, tags={"part"}, others={"planner", "terminator"}, of_others={"value"})
def hae_with_switches(
    table: RewardTable,
    *,
    gamma: Probability = 0.99,
    lam: Probability = 0.95,
    lam_segment: Probability = 0.95,
    against: str = "critic",
) -> RewardTable:
    """Compute advantages of plans, of actions, and of decisions to keep or change a plan (HAE of HiPER).

    arXiv 2602.16165. As `hae`, and an outcome with the tag `part: switch` is a decision before a plan or an
    action: it has the discounted reward from its turn to the end of the segment that it leads to, plus the
    discounted value of the next plan, less the decision's own value, by a third critic. A decision takes no
    time, and a reward on it, such as a penalty for keeping, counts for it alone (our reading).

    Args:
        gamma: Discount of an action.
        lam: Discount of later errors inside a segment.
        lam_segment: Discount of the errors of later segments.
        against: Name in `references` of the critic of actions; that of plans is called `planner`, that of
            decisions `terminator`.
    """
    switch = table.present & (tagged_as(table, "part") == name_id("switch"))
    return _hierarchical(table, (against, "planner", "terminator"), gamma, lam, lam_segment, switch)


def _hierarchical(
    table: RewardTable,
    critics: tuple[str, ...],
    gamma: float,
    lam: float,
    lam_segment: float,
    switch: Tensor,
) -> RewardTable:
    """Compute advantages of plans, actions and decisions; `switch` (N, K) marks the decisions."""
    plan = table.present & (tagged_as(table, "part") == name_id("plan"))
    low, high, *third = (_values_before(table, name)[:, None] for name in critics)  # (N, 1, K)
    decided = third[0] if third else torch.zeros_like(low)
    rewards = torch.where(table.valid, table.values, 0.0)
    zero = torch.zeros_like(rewards[..., 0]) if rewards.shape[-1] else rewards.sum(-1)
    # Carried from later places: the value and advantage that follow an action, the reward and discount of
    # the segment, the value and advantage of the next plan, and what follows from a turn on.
    value, lead, summed, discount, next_value, next_lead, ahead = zero, zero, zero, zero + 1, zero, zero, zero
    found = []
    for place in reversed(range(rewards.shape[-1])):
        here, chosen = plan[:, None, place], switch[:, None, place]
        reward, action = rewards[..., place], table.present[:, None, place] & ~here & ~chosen
        acted = reward + gamma * value - low[..., place] + gamma * lam * lead
        total = reward + summed
        ended = total + discount * next_value  # of a segment
        planned = ended - high[..., place] + discount * lam_segment * next_lead
        decision = reward + ahead - decided[..., place]
        credit = torch.where(here, planned, torch.where(action, acted, 0.0))
        found.append(torch.where(chosen, decision, credit))
        value = torch.where(here, high[..., place], torch.where(action, low[..., place], value))
        lead = torch.where(here, 0.0, torch.where(action, acted, lead))
        inside = reward + gamma * summed
        ahead = torch.where(here, ended, torch.where(action, inside + gamma * discount * next_value, ahead))
        next_value = torch.where(here, high[..., place], next_value)
        next_lead = torch.where(here, planned, next_lead)
        summed = torch.where(here, 0.0, torch.where(action, inside, summed))
        discount = torch.where(here, 1.0, torch.where(action, gamma * discount, discount))
    known = table.valid.any(-1, keepdim=True) & table.present[:, None]
    values = torch.stack(found[::-1], -1) if found else rewards
    return table.replace(values=torch.where(known, values, 0.0), valid=known)


def _values_before(table: RewardTable, name: str) -> Tensor:
    """Return the values of a critic before the first step of every outcome: (N, K)."""
    steps = per_step(table)
    start = torch.cat([torch.zeros_like(table.ends[:, :1]), table.ends[:, :-1]], 1).clamp(min=0)
    start = start.clamp(max=max(steps.ends.shape[1] - 1, 0))
    if not steps.ends.shape[1]:
        return start.double()
    return next_noted(noted(steps, f"{name}/value")).nan_to_num().gather(1, start)
