"""Comparisons that label each row by the sign of its advantage (KTO, BCO and others)."""

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
    """KTO loss: label each row desirable or undesirable by the sign of its advantage (arXiv 2402.01306).

    With g the implicit reward of a row, the loss of a desirable row is 1 - sigmoid(beta g - delta), and of an
    undesirable row 1 - sigmoid(delta - beta g). The loss of a group is the mean over its labelled rows.

    Args:
        beta: Scale of implicit rewards, above 0.
        delta: beta times z_0 of the paper, the mean implicit reward of mismatched answers; negative values
            count as 0. Our reading: use the value of the step before, `{name: last_metric, metrics:
            [rewards/unrelated]}`.
        desirable_weight: Weight of rows of positive advantage.
        undesirable_weight: Weight of rows of negative advantage.
        level: Label rows (`row`) or single steps (`step`).
    """
    reward, label = labelled(beta * implicit_reward, batch, level)
    weight = desirable_weight * label.clamp(min=0) - undesirable_weight * label.clamp(max=0)
    loss = weight * torch.sigmoid(-label * (reward - max(delta, 0.0)))  # 1 - sigmoid(x) = sigmoid(-x)
    index = group_index([batch.group])
    count = group_sum(label.abs(), index)
    return mean_over_groups(group_sum(loss, index) / count.clamp(min=1), count > 0, batch)


@compare(unit=Unit.GROUP)
def bco_pair(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    delta: float = 0.0,
    level: Level = "row",
) -> Tensor:
    """BCO loss: classify each row as chosen or rejected (arXiv 2404.04656; MPO, arXiv 2411.10442).

    The loss of a group is the sum of -log sigmoid(+-(beta g - delta)) over its rows, where g is the implicit
    reward. This is the quality loss of MPO.

    Args:
        beta: Scale of implicit rewards, above 0.
        delta: Shift of the reward, its running mean `{name: running_mean}`; TRL omits it since 1.0. Our
            reading: use the value of the step before.
        level: Label rows (`row`) or single steps (`step`).
    """
    reward, label = labelled(beta * implicit_reward, batch, level)
    return sum_over_labelled(softplus(-label * (reward - delta)) * label.abs(), label, batch)


# ---- other pair losses of TRL


@compare(unit=Unit.GROUP)
def nca_pair(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """NCA loss: raise the chosen row above 0 and limit the size of both rows (arXiv 2402.05369).

    The loss is -log sigmoid(r_w) - 1/2 log sigmoid(-r_w) - 1/2 log sigmoid(-r_l), where r is beta times the
    implicit reward of the chosen row w and the rejected row l.
    """
    reward, label = labelled(beta * implicit_reward, batch, level)
    loss = softplus(-reward) * (label > 0) + 0.5 * softplus(reward) * label.abs()
    return sum_over_labelled(loss, label, batch)


@compare(unit=Unit.GROUP)
def apo_zero(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """APO-zero: raise the chosen row and lower the rejected one, for data better than the model.

    arXiv 2408.06266.
    """
    reward, label = labelled(beta * implicit_reward, batch, level)
    return sum_over_labelled(torch.sigmoid(-label * reward) * label.abs(), label, batch)


@compare(unit=Unit.GROUP)
def apo_down(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """APO-down: lower both rows, the rejected one more, for data worse than the model.

    arXiv 2408.06266.
    """
    reward, label = labelled(beta * implicit_reward, batch, level)
    # Minimising this lowers the implicit reward of chosen rows, as intended.
    better = sum_over_labelled(torch.sigmoid(reward) * (label > 0), label, batch)
    margin, decided = margins(beta * implicit_reward, batch, level)
    return better + mean_over_groups(torch.sigmoid(-margin), decided, batch)  # 1 - sigmoid(r_w - r_l)


@compare(unit=Unit.GROUP)
def sppo_hard(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """SPPO with hard labels: regress implicit rewards to +-1 / (2 beta) (arXiv 2405.00675)."""
    reward, label = labelled(implicit_reward, batch, level)
    loss = (reward - label / (2 * beta)).square() * label.abs()  # unlabelled rows: 0
    return sum_over_labelled(loss, label, batch)


@compare(unit=Unit.GROUP)
def exo_pair(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: Annotated[float, Range(0, 1, above=True, below=True)] = 0.001,
    level: Level = "row",
) -> Tensor:
    """EXO loss: divergence of the model's preference from smoothed labels (arXiv 2402.00856).

    Args:
        beta: Scale of implicit rewards, above 0.
        label_smoothing: Probability of a wrong label, in (0, 1).
        level: Compare rows (`row`), or the rows step by step (`step`).
    """
    margin, decided = margins(beta * implicit_reward, batch, level)
    wrong = margin.new_tensor(label_smoothing)
    # Reverse KL, from (sigmoid(m), sigmoid(-m)) of the model to the labels (1 - e, e).
    loss = torch.sigmoid(margin) * (logsigmoid(margin) - torch.log1p(-wrong))
    loss = loss + torch.sigmoid(-margin) * (logsigmoid(-margin) - wrong.log())
    return mean_over_groups(loss, decided, batch)


def labelled(reward: Tensor, batch: Batch, level: Level) -> tuple[Tensor, Tensor]:
    """Return rewards and labels (1, -1, or 0 for none): (N, C) each, where C is 1 or the number of steps."""
    label = (batch.advantage * batch.mask).sign()
    if level == "step":
        return reward, label
    merit = masked_mean(batch.advantage, batch.mask, -1)[:, None]
    return reward.sum(-1, keepdim=True), merit.sign()  # (N, 1) each


def sum_over_labelled(loss: Tensor, label: Tensor, batch: Batch) -> Tensor:
    """Sum losses (N, C) over the rows of each group, then average over columns and groups.

    Only columns with labels of both signs count.
    """
    index = group_index([batch.group])
    better, worse = (group_sum((sign * label > 0).to(loss.dtype), index) for sign in (1, -1))
    return mean_over_groups(group_sum(loss, index), (better > 0) & (worse > 0), batch)
