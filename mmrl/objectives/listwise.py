"""Comparisons of all rows of a group with each other: pairs, sets and sorted values.

Like those of `compare`, they give the sum over groups of a micro-batch, divided by the groups of the update.
The steps of a row are added up first.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Probability
from mmrl.config.registry import compare
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_index, group_sum, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.compare import mean_over_groups


@compare(unit=Unit.GROUP)
def all_pairs(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    form: Literal["separate", "joint", "on_policy"] = "separate",
    epsilon: NonNegativeFloat = 0.2,
) -> Tensor:
    """Pairwise policy gradient: gaps of rewards times gaps of log-ratios (P3O, arXiv 2310.00212).

    The mean over all pairs of a group; a shift of a group's rewards changes nothing. It needs plain rewards,
    `advantage: [total]`, and the implicit reward `{name: log_ratio, against: old}`, limited to [-20, 20] in
    ratios. Our reading: both clipped forms, since the paper gives their gradient.

    Args:
        form: `separate` clips the ratio of each row (V1), `joint` the product of both ratios as a constant
            weight (V2); `on_policy` has no ratio.
        epsilon: Clip range of the ratio.
    """
    score, reward, (i, j) = _rows(implicit_reward, batch)
    gap, held = reward[i] - reward[j], score.clamp(-20.0, 20.0)
    if form == "separate":
        ratio = held.exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        loss = -torch.minimum(ratio[i] * gap, clipped[i] * gap)
        loss = loss - torch.minimum(-ratio[j] * gap, -clipped[j] * gap)
    else:
        both = (held[i] + held[j]).exp().clamp(1 - epsilon, 1 + epsilon).detach()
        loss = -gap * (score[i] - score[j]) * (both if form == "joint" else 1.0)
    return _mean_over_pairs(0.5 * loss, i, batch)


@compare(unit=Unit.GROUP)
def dno(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, scale: PositiveFloat = 1.0
) -> Tensor:
    """DPO loss with soft labels, the sigmoid of the difference of rewards (DNO, arXiv 2404.03715).

    The mean over all pairs of a group. It needs plain rewards, `advantage: [total]`; the paper's are win
    rates against answers of the current policy. Our reading, since only the abstract is known: the form.

    Args:
        beta: Scale of implicit rewards, the paper's eta, above 0.
        scale: Scale of rewards before the sigmoid, above 0; large values give hard labels.
    """
    score, reward, (i, j) = _rows(implicit_reward, batch)
    label, logit = torch.sigmoid(scale * (reward[i] - reward[j])), beta * (score[i] - score[j])
    return _mean_over_pairs(label * softplus(-logit) + (1 - label) * softplus(logit), i, batch)


@compare(unit=Unit.GROUP)
def aot(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: Probability = 0.0,
) -> Tensor:
    """DPO loss between sorted implicit rewards of chosen and of rejected rows (AOT, arXiv 2406.05882).

    Chosen rows have positive advantages, rejected ones negative: the whole distribution of the first is
    raised above that of the second. Our reading: rows are sorted within their group, where TRL's
    `aot_unpaired` sorts a micro-batch; values of the smaller side are repeated. For a pair it is `sigmoid`.

    Args:
        beta: Scale of implicit rewards, above 0.
        label_smoothing: Share of labels taken to be flipped, in [0, 1].
    """
    score, merit = implicit_reward.sum(-1), masked_mean(batch.advantage, batch.mask, -1)
    losses, decided = [], []
    for group in batch.group.unique():
        rows = batch.group == group
        sides = [score[rows & (sign * merit > 0)].sort().values for sign in (1, -1)]
        decided.append(all(map(len, sides)))
        num = max(map(len, sides)) if decided[-1] else 0
        places = torch.arange(num, device=score.device)
        better, worse = (side[places * len(side) // max(num, 1)] for side in sides)
        logit = beta * (better - worse)
        loss = (1 - label_smoothing) * softplus(-logit) + label_smoothing * softplus(logit)
        losses.append(loss.sum() / max(num, 1))
    return mean_over_groups(
        torch.stack(losses)[:, None], torch.tensor(decided).to(score.device)[:, None], batch
    )


def _rows(implicit_reward: Tensor, batch: Batch) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Compute scores and rewards of rows (N,) each, and both indices of every pair (P,) inside a group."""
    counted = batch.mask.sum(-1) > 0
    pair = (batch.group[:, None] == batch.group) & counted[:, None] & counted
    i, j = pair.triu(1).nonzero(as_tuple=True)
    return implicit_reward.sum(-1), masked_mean(batch.advantage, batch.mask, -1), (i, j)


def _mean_over_pairs(loss: Tensor, first: Tensor, batch: Batch) -> Tensor:
    """Average (P,) losses over the pairs of each group, given the first row of each, then over groups."""
    index = group_index([batch.group])
    num_groups = int(index.max()) + 1
    total, count = (group_sum(part, index[first], num_groups) for part in (loss, torch.ones_like(loss)))
    return mean_over_groups((total / count.clamp(min=1))[:, None], (count > 0)[:, None], batch)
