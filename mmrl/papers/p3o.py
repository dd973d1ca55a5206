"""P3O (arXiv 2310.00212): products of reward gaps and log-ratio gaps over all pairs of a group.

Title: Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for LLM Alignment
Formula: L = -(1 / 2) mean over pairs of (r_i - r_j) (log rho_i - log rho_j), clipped.
Our reading: both clipped forms, since the paper gives their gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import compare
from mmrl.core.step_table import Batch
from mmrl.core.types import Unit
from mmrl.objectives.listwise import mean_over_pairs, pairs_of_rows


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
    score, reward, (i, j) = pairs_of_rows(implicit_reward, batch)
    gap, held = reward[i] - reward[j], score.clamp(-20.0, 20.0)
    if form == "separate":
        ratio = held.exp()
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        loss = -torch.minimum(ratio[i] * gap, clipped[i] * gap)
        loss = loss - torch.minimum(-ratio[j] * gap, -clipped[j] * gap)
    else:
        both = (held[i] + held[j]).exp().clamp(1 - epsilon, 1 + epsilon).detach()
        loss = -gap * (score[i] - score[j]) * (both if form == "joint" else 1.0)
    return mean_over_pairs(0.5 * loss, i, batch)
