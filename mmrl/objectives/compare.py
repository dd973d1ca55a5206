"""Comparisons of the rows of a group: implicit rewards to a loss (pairs and rankings).

The result is the sum over groups of a micro-batch, divided by the groups of the update. With `level: row`
the steps of a row are added up first. With `level: step` every column is a comparison of its own, and a
group's loss is the mean over the columns that have two sides.
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


# ---- pairs: better rows have positive advantages, worse ones negative


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

    The margin is the sum of advantage times implicit reward over a group: for a pair, that of the chosen
    row minus that of the rejected one.

    Args:
        beta: Scale of implicit rewards, above 0. For implicit rewards that are matching errors it is half
            of the paper's (Diffusion-DPO, arXiv 2311.12908).
        gamma: Target margin of SimPO, at least 0.
        level: Compare rows (`row`), or the rows step by step (`step`).
        label_smoothing: Share of labels taken to be flipped, in [0, 1], as in TRL's `sigmoid`.
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

    Its mean over noisy labels, of which the share `label_smoothing` is flipped, is the loss on clean ones.

    Args:
        beta: Scale of implicit rewards, above 0.
        level: Compare rows (`row`), or the rows step by step (`step`).
        label_smoothing: Share of flipped labels, in [0, 0.5).
    """
    margin, decided = margins(implicit_reward, batch, level)
    loss = (1 - label_smoothing) * softplus(-beta * margin) - label_smoothing * softplus(beta * margin)
    # A share e of labels flipped: the mean is ((1 - e)^2 - e^2) / (1 - 2 e) = 1 times the clean loss.
    return mean_over_groups(loss / (1 - 2 * label_smoothing), decided, batch)


@compare(unit=Unit.GROUP)
def ipo(implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row") -> Tensor:
    """IPO loss: squared distance of the margin to 1 / (2 beta) (arXiv 2310.12036).

    Over rows, implicit rewards are averaged over the steps of each row and not added up, as in TRL.
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
    """DPO loss that turns into an exponential where the margin is positive (DiscoPOP, arXiv 2406.08414).

    With x beta times the margin and s = sigmoid(x / tau): (1 - s) (-log sigmoid(x)) + s exp(-x). The loss
    was discovered by a language model, and is not convex around 0.

    Args:
        beta: Scale of implicit rewards, above 0.
        tau: Width of the change of form, in (0, 1]; the paper's value (TRL's `discopop_tau`).
        level: Compare rows (`row`), or the rows step by step (`step`).
    """
    margin, decided = margins(implicit_reward, batch, level)
    logit = beta * margin
    # exp(-x) sigmoid(x / tau) as one exponential: apart, the first overflows where the second is 0.
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
    """Weigh each group's comparison by how likely its rows are under the policy (WPO, arXiv 2406.11827).

    The weight is the product over rows with an advantage of exp(mean of logp - log sum_k p_k^2), without
    gradient: 1 for rows that the policy would sample itself. TRL's `use_weighting`.

    Args:
        compare: The comparison that is weighed.
        max_weight: Largest weight; TRL's bound.
    """
    new, index = batch.others["new"], group_index([batch.group])
    surprise = masked_mean(new.logp - new.extra["sum_p2"].clamp(min=1e-30).log(), batch.mask, -1)
    moved = (batch.advantage * batch.mask != 0).any(-1)
    weights = group_sum(torch.where(moved, surprise, 0.0), index).exp().clamp(max=max_weight)
    loss = implicit_reward.new_zeros(())
    for group, weight in enumerate(weights):  # a comparison gives one number for all groups it is shown
        inside = (index == group).to(batch.mask.dtype)[:, None]
        part = batch.replace(mask=batch.mask * inside, advantage=batch.advantage * inside)
        loss = loss + weight * compare(implicit_reward * inside, part)
    return loss


def margins(implicit_reward: Tensor, batch: Batch, level: Level) -> tuple[Tensor, Tensor]:
    """Sum advantage times implicit reward over each group.

    Returns the margins (V, C), and whether each has rows of both signs. C is 1, or the number of steps.
    """
    advantage, index = batch.advantage * batch.mask, group_index([batch.group])
    margin = group_sum(advantage * implicit_reward, index)  # (V, T); of a pair: chosen minus rejected
    better, worse = (group_sum((sign * advantage > 0).to(margin.dtype), index) for sign in (1, -1))
    if level == "row":
        margin, better, worse = (part.sum(-1, keepdim=True) for part in (margin, better, worse))
    return margin, (better > 0) & (worse > 0)


def mean_over_groups(loss: Tensor, decided: Tensor, batch: Batch) -> Tensor:
    """Average (V, C) losses over the valid columns of each group, then over the groups of the update."""
    means = masked_mean(torch.where(decided, loss, 0.0), decided.to(loss.dtype), -1)
    return means.sum() / (batch.totals.groups or 1.0)  # groups without a decided column count too


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
    """Plackett-Luce ranking loss: implicit rewards ranked as the rewards (GDRO, arXiv 2601.02036).

    Best first, each row is compared with the rows ranked below it: minus the mean log-softmax of their
    scores under softmax(reward / tau). It needs plain rewards: `advantage: [total]`. Our reading: equal
    rewards rank in the order of the rows, and a group in which all are equal is left out.

    Args:
        beta: Scale of implicit rewards, above 0.
        tau: Temperature of the target distribution, in units of reward. 0 takes the best row alone: the
            Plackett-Luce ranking loss, and DPO for two rows.
        top1: Keep only the comparison of the best row with all others.
        level: Compare rows (`row`), or the rows step by step (`step`).
    """
    losses, decided = [], []
    for group in batch.group.unique():
        rows = batch.group == group
        score, reward, mask = beta * implicit_reward[rows], batch.advantage[rows], batch.mask[rows]
        if level == "row":
            score, reward = score.sum(-1, keepdim=True), masked_mean(reward, mask, -1)[:, None]
            mask = mask.any(-1, keepdim=True)  # (n, 1): the row is the only column
        loss, varied = _ranking(score, reward, mask > 0, tau, top1)
        losses.append(loss)
        decided.append(varied)
    return mean_over_groups(torch.stack(losses), torch.stack(decided), batch)


def _ranking(
    score: Tensor, reward: Tensor, takes_part: Tensor, tau: float, top1: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of every column (C,), and whether its rewards differ."""
    order = torch.where(takes_part, reward, -torch.inf).argsort(dim=0, descending=True, stable=True)
    score, reward, takes_part = (part.gather(0, order) for part in (score, reward, takes_part))  # best first
    itself = torch.eye(len(score), dtype=torch.bool, device=score.device)[..., None]
    ranked_below = torch.ones_like(itself[..., 0]).triu()[..., None]
    # Rows that do not take part stand last: each is compared with itself alone, which gives exactly 0.
    compared = (ranked_below & takes_part) | itself  # (i, j, C): row i is compared with row j
    meant = score  # tau 0: the target is row i itself, the best of those it is compared with
    if tau > 0:
        target = torch.where(compared, reward / tau, -torch.inf).softmax(1)  # over j
        meant = (target * score).sum(1)
    terms = torch.where(compared, score, -torch.inf).logsumexp(1) - meant  # -sum_j target_ij log softmax_ij
    lowest = torch.where(takes_part, reward, torch.inf).amin(0)
    highest = torch.where(takes_part, reward, -torch.inf).amax(0)
    return (terms[:1] if top1 else terms).sum(0), highest - lowest > EQUAL
