"""Comparisons: losses on the implicit rewards of the rows of a group (pairs and rankings).

The result is the sum over the groups of a micro-batch, divided by the number of groups of the update. With
`level: row` implicit rewards are summed over the steps of a row. With `level: step` every step is compared
alone, and the loss of a group is the mean over the steps that have both chosen and rejected rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, PositiveShare, Probability, Range
from mmrl.config.registry import compare
from mmrl.config.schema import Piece
from mmrl.core.reward_table import EQUAL
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_index, group_sum, masked_mean
from mmrl.core.types import Unit

Level = Literal["row", "step"]


# ---- pairs: chosen rows have positive advantages, rejected rows negative ones


@compare(unit=Unit.GROUP)
def sigmoid(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    gamma: NonNegativeFloat = 0.0,
    level: Level = "row",
    label_smoothing: Probability = 0.0,
) -> Tensor:
    """DPO loss: -log sigmoid(beta margin - gamma) (arXiv 2305.18290; SimPO, arXiv 2405.14734).

    The margin of a group is the sum of advantage times implicit reward; for a pair, the implicit reward of
    the chosen row minus that of the rejected one.

    Args:
        beta: Scale of implicit rewards, above 0. With matching errors as implicit rewards it is half of the
            beta of Diffusion-DPO (arXiv 2311.12908).
        gamma: Target margin of SimPO, at least 0.
        level: Compare rows (`row`), or rows step by step (`step`).
        label_smoothing: Assumed fraction of flipped labels, in [0, 1], as in TRL's `sigmoid`.
    """
    margin, decided = margins(implicit_reward, batch, level)
    logit = beta * margin - gamma  # softplus(-logit) = -log sigmoid(logit), without underflow
    loss = (1 - label_smoothing) * softplus(-logit) + label_smoothing * softplus(logit)
    return mean_over_groups(loss, decided, batch)


@compare(unit=Unit.GROUP)
def robust(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    level: Level = "row",
    label_smoothing: Annotated[float, Range(0, 0.5, below=True)] = 0.1,
) -> Tensor:
    """Robust DPO: the DPO loss, corrected for flipped labels (arXiv 2403.00409).

    If a fraction `label_smoothing` of the labels is flipped, the expected loss is the loss on clean labels.

    Args:
        beta: Scale of implicit rewards, above 0.
        level: Compare rows (`row`), or rows step by step (`step`).
        label_smoothing: Fraction of flipped labels, in [0, 0.5).
    """
    margin, decided = margins(implicit_reward, batch, level)
    loss = (1 - label_smoothing) * softplus(-beta * margin) - label_smoothing * softplus(beta * margin)
    # Divided by 1 - 2 e, the loss is unbiased: with a fraction e of flipped labels its mean is the clean loss
    # times ((1 - e)^2 - e^2) / (1 - 2 e) = 1.
    return mean_over_groups(loss / (1 - 2 * label_smoothing), decided, batch)


@compare(unit=Unit.GROUP)
def ipo(implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row") -> Tensor:
    """IPO loss: squared distance of the margin to 1 / (2 beta) (arXiv 2310.12036).

    With `level: row` implicit rewards are averaged over the steps of a row, not summed, as in TRL.
    """
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1) if level == "row" else 1.0
    margin, decided = margins(implicit_reward / length, batch, level)
    return mean_over_groups((margin - 1 / (2 * beta)).square(), decided, batch)


@compare(unit=Unit.GROUP)
def hinge(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """Hinge loss on the margin: max(0, 1 - beta margin) (SLiC, arXiv 2305.10425)."""
    margin, decided = margins(implicit_reward, batch, level)
    return mean_over_groups((1 - beta * margin).clamp(min=0), decided, batch)


@compare(unit=Unit.GROUP)
def discopop(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.05,
    tau: PositiveShare = 0.05,
    level: Level = "row",
) -> Tensor:
    """Blend of the DPO loss and an exponential loss for positive margins (DiscoPOP, arXiv 2406.08414).

    The loss is (1 - s) (-log sigmoid(x)) + s exp(-x) with x = beta margin and s = sigmoid(x / tau). A
    language model discovered this loss; it is not convex around 0.

    Args:
        beta: Scale of implicit rewards, above 0.
        tau: Width of the transition, in (0, 1]; the default is the paper's (TRL's `discopop_tau`).
        level: Compare rows (`row`), or rows step by step (`step`).
    """
    margin, decided = margins(implicit_reward, batch, level)
    logit = beta * margin
    # exp(-x) sigmoid(x / tau) as one exponential: separately, exp(-x) overflows where the sigmoid is 0.
    exponential = (logsigmoid(logit / tau) - logit).exp()
    return mean_over_groups(torch.sigmoid(-logit / tau) * softplus(-logit) + exponential, decided, batch)


@compare(unit=Unit.GROUP, extra={"sum_p2"})
def wpo(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    compare: Callable = Piece("sigmoid"),
    max_weight: PositiveFloat = 1.0,
) -> Tensor:
    """Weight the comparison of a group by the likelihood of its rows (WPO, arXiv 2406.11827).

    The weight is the product of exp(mean over steps of logp - log sum_k p_k^2) over the rows with an
    advantage, where k is a token of the vocabulary. The weight has no gradient, and is about 1 for rows that
    the policy would sample. This is TRL's `use_weighting`.

    Args:
        compare: The comparison whose loss is weighted.
        max_weight: Upper bound of the weight, as in TRL.
    """
    new, index = batch.others["new"], group_index([batch.group])
    surprise = masked_mean(new.logp - new.extra["sum_p2"].clamp(min=1e-30).log(), batch.mask, -1)
    moved = (batch.advantage * batch.mask != 0).any(-1)
    weights = group_sum(torch.where(moved, surprise, 0.0), index).exp().clamp(max=max_weight)
    loss = implicit_reward.new_zeros(())
    for group, weight in enumerate(weights):  # one group at a time: a comparison returns a sum
        inside = (index == group).to(batch.mask.dtype)[:, None]
        part = batch.replace(mask=batch.mask * inside, advantage=batch.advantage * inside)
        loss = loss + weight * compare(implicit_reward * inside, part)
    return loss


def margins(implicit_reward: Tensor, batch: Batch, level: Level) -> tuple[Tensor, Tensor]:
    """Compute margins: the sum of advantage times implicit reward over each group.

    Margins are (V, C) for V groups, where C is 1 or the number of steps. The second result (V, C) is True
    where a group has advantages of both signs.
    """
    advantage, index = batch.advantage * batch.mask, group_index([batch.group])
    margin = group_sum(advantage * implicit_reward, index)  # (V, T); of a pair: chosen minus rejected
    better, worse = (group_sum((sign * advantage > 0).to(margin.dtype), index) for sign in (1, -1))
    if level == "row":
        margin, better, worse = (part.sum(-1, keepdim=True) for part in (margin, better, worse))
    return margin, (better > 0) & (worse > 0)


def mean_over_groups(loss: Tensor, decided: Tensor, batch: Batch) -> Tensor:
    """Average losses (V, C) over the `decided` columns of each of V groups, then over the update's groups."""
    means = masked_mean(torch.where(decided, loss, 0.0), decided.to(loss.dtype), -1)
    return means.sum() / (batch.totals.groups or 1.0)  # divide by all groups, decided or not


# ---- lists: advantages are rewards


@compare(unit=Unit.GROUP)
def plackett_luce(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 12.0,
    tau: NonNegativeFloat = 0.05,
    top1: bool = False,
    level: Level = "row",
) -> Tensor:
    """Plackett-Luce ranking loss: rank implicit rewards in the order of rewards (GDRO, arXiv 2601.02036).

    Each row is compared with the rows ranked below it: the loss is the cross-entropy of the softmax of their
    scores (beta times implicit reward) to softmax(reward / tau). Advantages must be rewards: set
    `advantage: [total]`. Our reading: equal rewards rank in row order, and groups of equal rewards add 0.

    Args:
        beta: Scale of implicit rewards, above 0.
        tau: Temperature of the target distribution, in units of reward. 0 targets the best row only: the
            standard Plackett-Luce loss, and DPO for two rows.
        top1: Only compare the best row with all others.
        level: Compare rows (`row`), or rows step by step (`step`).
    """
    losses, decided = [], []
    for group in batch.group.unique():
        rows = batch.group == group
        score, reward, mask = beta * implicit_reward[rows], batch.advantage[rows], batch.mask[rows]
        if level == "row":
            score, reward = score.sum(-1, keepdim=True), masked_mean(reward, mask, -1)[:, None]
            mask = mask.any(-1, keepdim=True)  # (n, 1): a row is one entry
        loss, varied = _ranking(score, reward, mask > 0, tau, top1)
        losses.append(loss)
        decided.append(varied)
    return mean_over_groups(torch.stack(losses), torch.stack(decided), batch)


def _ranking(
    score: Tensor, reward: Tensor, takes_part: Tensor, tau: float, top1: bool
) -> tuple[Tensor, Tensor]:
    """Compute the ranking loss of every column (C,), and whether the rewards in it differ (C,)."""
    order = torch.where(takes_part, reward, -torch.inf).argsort(dim=0, descending=True, stable=True)
    score, reward, takes_part = (part.gather(0, order) for part in (score, reward, takes_part))  # best first
    itself = torch.eye(len(score), dtype=torch.bool, device=score.device)[..., None]
    ranked_below = torch.ones_like(itself[..., 0]).triu()[..., None]
    # Rows outside the mask come last and are compared only with themselves: loss exactly 0.
    compared = (ranked_below & takes_part) | itself  # (i, j, C): row i is compared with row j
    meant = score  # expected score; tau 0: row i, the best row in its comparison
    if tau > 0:
        target = torch.where(compared, reward / tau, -torch.inf).softmax(1)  # over j
        meant = (target * score).sum(1)
    terms = torch.where(compared, score, -torch.inf).logsumexp(1) - meant  # -sum_j target_ij log softmax_ij
    lowest = torch.where(takes_part, reward, torch.inf).amin(0)
    highest = torch.where(takes_part, reward, -torch.inf).amax(0)
    return (terms[:1] if top1 else terms).sum(0), highest - lowest > EQUAL
