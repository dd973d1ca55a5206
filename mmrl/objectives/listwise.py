"""Comparisons of all rows of a group: pairs and sorted values.

As in `compare`, the result is the sum over the groups of a micro-batch, divided by the number of groups of
the update. Implicit rewards are summed over the steps of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.config.ranges import PositiveFloat, Probability
from mmrl.config.registry import compare
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_index, group_sum, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.compare import mean_over_groups


@compare(unit=Unit.GROUP)
def aot(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    label_smoothing: Probability = 0.0,
) -> Tensor:
    """DPO loss between sorted implicit rewards of chosen and of rejected rows (AOT, arXiv 2406.05882).

    Chosen rows have positive advantages, rejected ones negative. The loss raises the distribution of chosen
    rewards above that of rejected ones; for a pair it is `sigmoid`. Our reading: rows are sorted within their
    group (TRL's `aot_unpaired`: in a micro-batch); values of the smaller side are repeated.

    Args:
        beta: Scale of implicit rewards, above 0.
        label_smoothing: Assumed fraction of flipped labels, in [0, 1].
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


def pairs_of_rows(implicit_reward: Tensor, batch: Batch) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return scores and rewards of rows, (N,) each, and the two row indices (P,) of all P pairs in groups."""
    counted = batch.mask.sum(-1) > 0
    pair = (batch.group[:, None] == batch.group) & counted[:, None] & counted
    i, j = pair.triu(1).nonzero(as_tuple=True)
    return implicit_reward.sum(-1), masked_mean(batch.advantage, batch.mask, -1), (i, j)


def mean_over_pairs(loss: Tensor, first: Tensor, batch: Batch) -> Tensor:
    """Average pair losses (P,) over each group, then over groups; `first` (P,): first row of each pair."""
    index = group_index([batch.group])
    num_groups = int(index.max()) + 1
    total, count = (group_sum(part, index[first], num_groups) for part in (loss, torch.ones_like(loss)))
    return mean_over_groups((total / count.clamp(min=1))[:, None], (count > 0)[:, None], batch)
