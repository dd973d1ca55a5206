"""Comparisons that read rows on their own: the sign of a row's advantage is its label."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Range
from mmrl.config.registry import compare
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_index, group_sum, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.compare import Level, margins, mean_over_groups


@compare(unit=Unit.GROUP)
def kto(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    delta: float = 0.0,
    desirable_weight: NonNegativeFloat = 1.0,
    undesirable_weight: NonNegativeFloat = 1.0,
    level: Level = "row",
) -> Tensor:
    """Ask of every row alone that a desirable one gains and an undesirable one loses (KTO, arXiv 2402.01306).

    A row of positive advantage costs 1 - sigmoid(beta gain - delta), one of negative advantage 1 -
    sigmoid(delta - beta gain), each times its weight; a group costs the mean of its labelled rows. `delta` is
    beta times the paper's z_0, the mean gain of unrelated answers, and 0 where it would be negative. Our
    reading: it is that of the step before, `{name: last_metric, metrics: [rewards/unrelated]}`.
    """
    reward, label = _labelled(beta * implicit_reward, batch, level)
    weight = desirable_weight * label.clamp(min=0) - undesirable_weight * label.clamp(max=0)
    return _mean_over_labelled(weight * torch.sigmoid(-label * (reward - max(delta, 0.0))), label, batch)


@compare(unit=Unit.GROUP)
def bco_pair(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    delta: float = 0.0,
    level: Level = "row",
) -> Tensor:
    """Tell better rows from worse ones by the sign of beta gain - delta, each alone (BCO, arXiv 2404.04656;
    MPO's quality loss, arXiv 2411.10442).

    The costs -log sigmoid(+-(beta gain - delta)) of a group add up. `delta` is the mean reward so far,
    `{name: running_mean}`; TRL has left it out since 1.0. Our reading: it is that of the step before.
    """
    reward, label = _labelled(beta * implicit_reward, batch, level)
    return _sum_over_labelled(softplus(-label * (reward - delta)) * label.abs(), label, batch)


@compare(unit=Unit.GROUP)
def anchor_chosen(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    delta: float = 0.0,
    level: Level = "row",
) -> Tensor:
    """Keep the better rows of every group above `delta`: -log sigmoid(beta gain - delta) (mDPO's anchor,
    arXiv 2406.11839)."""
    reward, label = _labelled(beta * implicit_reward, batch, level)
    return _sum_over_labelled(softplus(delta - reward) * (label > 0), label, batch)


# ---- other pair losses of TRL


@compare(unit=Unit.GROUP)
def nca_pair(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """Raise the better row above 0 and hold both back: -log sigmoid(r_w) - 1/2 log sigmoid(-r_w) - 1/2 log
    sigmoid(-r_l), r the beta times the gain (NCA, arXiv 2402.05369)."""
    reward, label = _labelled(beta * implicit_reward, batch, level)
    loss = softplus(-reward) * (label > 0) + 0.5 * softplus(reward) * label.abs()
    return _sum_over_labelled(loss, label, batch)


@compare(unit=Unit.GROUP)
def apo_zero(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """Make the better row likelier and the worse one less likely: for data that is better than the model
    (APO-zero, arXiv 2408.06266)."""
    reward, label = _labelled(beta * implicit_reward, batch, level)
    return _sum_over_labelled(torch.sigmoid(-label * reward) * label.abs(), label, batch)


@compare(unit=Unit.GROUP)
def apo_down(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """Make both rows less likely, the worse one more so: for data that is worse than the model (APO-down,
    arXiv 2408.06266)."""
    reward, label = _labelled(beta * implicit_reward, batch, level)
    better = _sum_over_labelled(torch.sigmoid(reward) * (label > 0), label, batch)
    margin, decided = margins(beta * implicit_reward, batch, level)
    return better + mean_over_groups(torch.sigmoid(-margin), decided, batch)


@compare(unit=Unit.GROUP)
def sppo_hard(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """Pull the gain of the better row to 1 / (2 beta) and of the worse one to the opposite (SPPO with hard
    labels, arXiv 2405.00675)."""
    reward, label = _labelled(implicit_reward, batch, level)
    loss = (reward - label / (2 * beta)).square() * label.abs()
    return _sum_over_labelled(loss, label, batch)


@compare(unit=Unit.GROUP)
def exo_pair(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: Annotated[float, Range(0, 1, above=True, below=True)] = 0.001,
    level: Level = "row",
) -> Tensor:
    """Take the divergence of the model's preference from one that is wrong with the probability
    `label_smoothing` (EXO, arXiv 2402.00856)."""
    if not 0 < label_smoothing < 1:
        raise ValueError(f"`label_smoothing` must lie in (0, 1), not {label_smoothing}")
    margin, decided = margins(beta * implicit_reward, batch, level)
    wrong = margin.new_tensor(label_smoothing)
    loss = torch.sigmoid(margin) * (logsigmoid(margin) - torch.log1p(-wrong))
    loss = loss + torch.sigmoid(-margin) * (logsigmoid(-margin) - wrong.log())
    return mean_over_groups(loss, decided, batch)


def _labelled(reward: Tensor, batch: Batch, level: Level) -> tuple[Tensor, Tensor]:
    """Give rewards and labels (1, -1, or 0 for none): (N, C) each. C is 1, or the steps."""
    label = (batch.advantage * batch.mask).sign()
    if level == "step":
        return reward, label
    merit = masked_mean(batch.advantage, batch.mask, -1)[:, None]
    return reward.sum(-1, keepdim=True), merit.sign()


def _mean_over_labelled(loss: Tensor, label: Tensor, batch: Batch) -> Tensor:
    """Average (N, C) losses over the labelled rows of each group, then over its columns and over groups."""
    index = group_index([batch.group])
    count = group_sum(label.abs(), index)
    return mean_over_groups(group_sum(loss, index) / count.clamp(min=1), count > 0, batch)


def _sum_over_labelled(loss: Tensor, label: Tensor, batch: Batch) -> Tensor:
    """Add (N, C) losses up over the rows of each group, and average over its columns and over groups. A
    column counts where it has two sides."""
    index = group_index([batch.group])
    better, worse = (group_sum((sign * label > 0).to(loss.dtype), index) for sign in (1, -1))
    return mean_over_groups(group_sum(loss, index), (better > 0) & (worse > 0), batch)
