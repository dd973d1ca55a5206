"""DVAO (arXiv 2605.25604): normalise every reward in its group, and weight it by its deviation there.

Title: DVAO: Dynamic Variance-adaptive Advantage Optimization for Multi-reward Reinforcement Learning
Formula: A = sum_k w_k (r_k - mean_k) / (sum_k |w_k| std_k + eps).
Our reading: eps, and the size of a negative weight.
"""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import NonNegativeFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def variance_weights(table: RewardTable, *, by: Tags = BY_GROUP, eps: NonNegativeFloat = 1e-6) -> RewardTable:
    """Normalise each reward in its group, and weigh it by its deviation there (DVAO, arXiv 2605.25604).

    A = sum_k w_k (r_k - mean_k) / (sum_k |w_k| std_k + eps): a reward that hardly varies is not blown up, and
    no advantage is larger than GRPO's of the weighted sum. It stands for `total` and `group_normalize`; with
    one reward it is GRPO. Our readings: eps, and the size of a negative weight. A reward that does not apply
    adds nothing.
    """
    groups = table.groups(by)
    centred = torch.where(table.valid & ~groups.flat(), table.values - groups.mean(), 0.0)
    weights = torch.tensor(list(table.weights.values()), dtype=torch.float64)[:, None]
    spread = (weights.abs() * groups.std()).sum(1, keepdim=True)
    credit = (weights * centred).sum(1, keepdim=True)
    return table.replace(
        values=torch.where(credit == 0, 0.0, credit / (spread + eps)),  # with an eps of 0: not 0 / 0
        valid=table.valid.any(1, keepdim=True),
        weights={"total": 1.0},
    )
