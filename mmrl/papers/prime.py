"""PRIME (arXiv 2502.01456): a reward model trained on outcomes alone rewards every token.

Title: Process Reinforcement through Implicit Rewards
Formula: q_t = log p_prm(y_t) / p_ref(y_t); A_t = coef sum_(s >= t) (q_s - mean of others) + (r - mean of
others); the model learns -log sigmoid(+-beta sum_t q_t).
Our reading: in a group of one nothing is compared, so its credit is 0.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.advantages.values import discounted
from mmrl.config.ranges import AtMost, PositiveFloat, Probability, Tags
from mmrl.config.registry import advantage, compare, group_filter
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_count, group_index, group_mean, masked_mean
from mmrl.core.types import Unit


@advantage(others={"prm"})
def process_returns(
    table: RewardTable,
    *,
    coef: PositiveFloat = 5.0,
    against: str = "ref",
    normalize: bool = False,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Add returns of implicit process rewards to the outcome's (PRIME, arXiv 2502.01456).

    A step's process reward q is the log-ratio of the second model `prm` to its reference. With n rows in a
    group, row i has the process reward coef (q n - sum over rows of mean q) / (n - 1) at every step, and its
    outcome reward, compared alike, at the end; the result is the sum from every step on. Put it after
    `total`; the paper whitens afterwards (`{name: batch_normalize, eps: 1e-8}`).

    Our reading: in a group of one nothing is compared, so its credit is 0.

    Args:
        coef: Weight of process rewards (the released script: 5).
        against: Name of the reward model's reference in `references`.
        normalize: Divide a row's process rewards by the largest absolute sum from a step to the end.
        by: Keys that define a group.
    """
    last = table.last.clamp(min=0)[:, None, None].expand(-1, len(table.names), 1)
    outcome = table.values.gather(2, last)  # (N, R, 1)
    groups = GroupStatistics(outcome, table.valid.gather(2, last), table.index(by)[:, :1])
    count, steps = groups.count(), per_step(table)
    gap = noted(steps, "prm/logp") - noted(steps, f"{against}/logp")
    known = steps.present & ~gap.isnan()
    process = torch.where(known, gap, 0.0)  # (N, T)
    if normalize and process.numel():
        process = process / (discounted(process, 1.0).abs().amax(-1, keepdim=True) + 1e-6)
    mean = process.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
    means = dataclasses.replace(groups, values=mean[:, None].expand_as(outcome))
    others = (count - 1).clamp(min=1)
    credit = (process[:, None] * count - means.sum()) / others
    credit = torch.where(known[:, None], credit, 0.0)
    compared = (outcome * count - groups.sum()) / others
    values = torch.where(count < 2, 0.0, coef * discounted(credit, 1.0) + compared)
    return steps.replace(values=values, valid=steps.valid & known[:, None])


@group_filter
def mean_between(
    table: RewardTable,
    *,
    low: Annotated[Probability, AtMost("high")] = 0.2,
    high: Probability = 0.8,
    of: str = "",
) -> Tensor:
    """Keep groups whose mean reward is in a range (PRIME's online filter, arXiv 2502.01456).

    Groups without any known reward are dropped.

    Args:
        low: Smallest mean that is kept.
        high: Largest mean that is kept.
        of: Name of a reward from 0 to 1; without it, the weighted sum counts.
    """
    if not len(table):
        return torch.ones(0, dtype=torch.bool)
    reward = table.at_end(of) if of else table.reward()
    index, known = group_index([table.group]), ~reward.isnan()
    mean = group_mean(reward.nan_to_num(), index, known)
    return (group_count(index, known) > 0) & (mean >= low - EQUAL) & (mean <= high + EQUAL)


@compare(unit=Unit.GROUP)
def cross_entropy(implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.05) -> Tensor:
    """Predict the outcome of a row from its implicit reward by cross-entropy (PRIME, arXiv 2502.01456).

    A row costs -log sigmoid(beta g) where its advantage is above 0, and -log sigmoid(-beta g) elsewhere, with
    g its implicit reward. Put it behind a chain that gives the raw outcome, such as `[{name: pick, of:
    correct}]`. `beta` is the scale of implicit rewards.
    """
    counted = batch.mask.sum(-1) > 0
    right = masked_mean(batch.advantage, batch.mask, -1) > 0
    evidence = beta * implicit_reward.sum(-1)
    loss = softplus(torch.where(right, -evidence, evidence))
    return torch.where(counted, loss, 0.0).sum() / (batch.totals.rows or 1.0)
