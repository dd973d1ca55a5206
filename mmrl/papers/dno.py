"""DNO (arXiv 2404.03715): a DPO loss whose labels are the sigmoid of reward differences.

Title: Direct Nash Optimization: Teaching Language Models to Self-Improve with General Preferences
Formula: -s log sigmoid(m) - (1 - s) log sigmoid(-m), s = sigmoid(scale (r_i - r_j)), m = beta (g_i - g_j),
with g the implicit rewards.
Our reading: the form, since only the abstract is known; rewards stand for the win rates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import compare
from mmrl.core.step_table import Batch
from mmrl.core.types import Unit
from mmrl.objectives.listwise import mean_over_pairs, pairs_of_rows


@compare(unit=Unit.GROUP)
def dno(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, scale: PositiveFloat = 1.0
) -> Tensor:
    """DPO loss with soft labels, the sigmoid of the difference of rewards (DNO, arXiv 2404.03715).

    The mean over all pairs of a group. It reads plain rewards, `advantage: [total]`; the paper has win rates
    against answers of the current policy. Our reading, since only the abstract is known: the form.

    Args:
        beta: Scale of implicit rewards, the paper's eta, above 0.
        scale: Scale of rewards before the sigmoid, above 0; large values give hard labels.
    """
    score, reward, (i, j) = pairs_of_rows(implicit_reward, batch)
    label, logit = torch.sigmoid(scale * (reward[i] - reward[j])), beta * (score[i] - score[j])
    return mean_over_pairs(label * softplus(-logit) + (1 - label) * softplus(logit), i, batch)
