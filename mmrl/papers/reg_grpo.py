"""Reg-GRPO (arXiv 2506.07464): regress the log-ratios of a group on its advantages.

Title: DeepVideo-R1: Video Reinforcement Fine-Tuning via Difficulty-aware Regressive GRPO
Formula: L = mean over the group of (A - (rho - mean rho) / sqrt(var rho + delta))^2, rho the log-ratio of a
row.
Our reading: `delta`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import compare
from mmrl.core.reward_table import EQUAL
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_index, group_mean, group_range, group_sum, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.compare import mean_over_groups


@compare(unit=Unit.GROUP)
def regression(
    implicit_reward: Tensor, batch: Batch, *, delta: PositiveFloat = 1e-2, detach_sigma: bool = False
) -> Tensor:
    """Regress the normalised log-ratios of a group on its advantages (Reg-GRPO, arXiv 2506.07464).

    A group costs the mean over its rows of (A - (rho - mean rho) / sqrt(var rho + delta))^2, with rho the
    sum of implicit rewards over a row and the variance of the population. With `implicit_reward: {name:
    log_ratio, against: old}` it is the paper's loss; `mean_log_ratio` in its place is normalised by length.
    Advantages are the paper's after `{name: group_normalize, std: population, eps: 0}`: then the loss is 2
    (1 - the correlation of rewards and rho), up to `delta`. It does not depend on the scale of rho, so only
    a KL penalty, or few updates, bound how far the policy moves.

    Our reading: `delta`, without which the gradient is undefined while the policy is the one that sampled.
    There it is that of the policy gradient times 2 / sqrt(delta), so that the loss differs from GRPO's from
    the second update of a collection on. Groups of equal advantages cost nothing and count in the mean; of
    two rows only the order is learned, so groups should have three or more.

    Args:
        delta: Added to the variance, in squared nats; sets the step size of the first update.
        detach_sigma: Take the standard deviation as a constant in the gradient.
    """
    rho, counted = implicit_reward.sum(-1), batch.mask.sum(-1) > 0  # (N,)
    index = group_index([batch.group])
    advantage = masked_mean(batch.advantage, batch.mask, -1)
    away = torch.where(counted, rho - group_mean(rho, index, counted), 0.0)
    variance = group_mean(away.square(), index, counted)
    sigma = (variance + delta).sqrt()
    predicted = away / (sigma.detach() if detach_sigma else sigma)
    error = torch.where(counted, (advantage - predicted).square(), 0.0)
    size = group_sum(counted.to(error.dtype), index)
    loss = group_sum(error, index) / size.clamp(min=1)  # (V,)
    varied = group_range(advantage, index, counted) > EQUAL  # (N,): of each row's group
    decided = group_sum(varied.to(error.dtype), index) > 0
    return mean_over_groups(loss[:, None], decided[:, None], batch)
