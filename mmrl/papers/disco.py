"""DisCO (arXiv 2505.12366): score right answers above wrong ones, without advantages or clipping.

Title: DisCO: Reinforcing Large Reasoning Models with Discriminative Constrained Optimization
Formula: L = tau log mean exp(s_wrong / tau) - mean s_right + beta / 2 max(KL - delta, 0)^2.
Our reading: the KL is the mean over an answer, the paper's over the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, PositiveFloat
from mmrl.config.registry import compare, implicit_reward, penalty
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import group_extreme, group_index, group_sum, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.compare import mean_over_groups
from mmrl.objectives.comparison import row_share
from mmrl.objectives.surrogates import step_ratio


@compare(unit=Unit.GROUP)
def discriminate(implicit_reward: Tensor, batch: Batch, *, tau: PositiveFloat | None = 10.0) -> Tensor:
    """Raise the mean score of right rows above the soft maximum of wrong ones (DisCO, arXiv 2505.12366).

    Right rows have positive advantages, wrong ones negative; their sizes are not read. A score is the
    implicit reward of a row, such as `mean_logp` or `mean_ratio`. The soft maximum is tau log mean exp(score
    / tau). A group without both kinds costs nothing, and counts in the divisor, as in the paper.

    Args:
        tau: Temperature of the soft maximum: 10 with `mean_logp`, 1 with `mean_ratio`; null takes the mean
            (DisCO-b).
    """
    score, index = implicit_reward.sum(-1), group_index([batch.group])
    merit = masked_mean(batch.advantage, batch.mask, -1)
    right, wrong = ((sign * merit > 0) for sign in (1, -1))
    counts = [group_sum(rows.to(score.dtype), index) for rows in (right, wrong)]
    means = [
        group_sum(torch.where(rows, score, 0.0), index) / count.clamp(min=1)
        for rows, count in zip((right, wrong), counts, strict=True)
    ]
    if tau is not None:
        # Less the largest, so that no exponential overflows; -inf where a group has no wrong row.
        top = group_extreme(score.detach(), index, wrong).nan_to_num(neginf=0.0)
        power = torch.where(wrong, (score - top) / tau, -torch.inf).exp()
        mean = group_sum(power, index)
        mean = torch.where(counts[1] > 0, mean / counts[1].clamp(min=1), 1.0)
        means[1] = tau * mean.log() + group_sum(torch.where(wrong, top, 0.0), index) / counts[1].clamp(min=1)
    decided = (counts[0] > 0) & (counts[1] > 0)
    return mean_over_groups((means[1] - means[0])[:, None], decided[:, None], batch)


@penalty(unit=Unit.ROW)
def kl_hinge(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 1000.0,
    delta: NonNegativeFloat = 1e-4,
    estimator: Literal["k1", "k3"] = "k3",
    against: str = "old",
) -> Tensor:
    """Squared hinge on the KL divergence from the policy that sampled (DisCO, arXiv 2505.12366).

    coef / 2 max(KL - delta, 0)^2. Our reading: the KL is the mean over an answer, the paper's over the
    batch, whose hinge is never larger than the mean of these; so the loss does not depend on micro-batches.
    Log-ratios count within [-20, 20].

    Args:
        coef: Weight of the squared hinge, the paper's beta.
        delta: Divergence that costs nothing, in nats a step.
        estimator: With d the log-ratio of new to old: `k3` is exp(d) - 1 - d, `k1` is -d.
        against: Policy that sampled.
    """
    gap = step_ratio(new, batch, against=against).clamp(-20.0, 20.0)
    divergence = masked_mean(-gap if estimator == "k1" else torch.expm1(gap) - gap, batch.mask, -1)
    return 0.5 * coef * (divergence - delta).clamp(min=0).square()[:, None] * batch.mask


@implicit_reward(unit=Unit.ROW)
def mean_ratio(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Mean probability ratio of a row to another policy (DisCO's ratio score, arXiv 2505.12366).

    Log-ratios are limited to [-20, 20].
    """
    gap = ((new.logp - batch.by(against, new).logp) * batch.mask).clamp(-20.0, 20.0)
    return gap.exp() * row_share(batch)  # exp(0) outside of the mask, which the objective drops
