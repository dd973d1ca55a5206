"""KL penalty inside the reward (RLOO, REINFORCE++)."""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(notes={"logp"})
def kl_in_reward(
    table: RewardTable,
    *,
    coef: NonNegativeFloat = 0.05,
    against: str = "ref",
    estimator: Literal["k1", "k2", "k3"] = "k1",
) -> RewardTable:
    """Subtract the KL to another policy from the reward (RLOO, arXiv 2402.14740, eq. 2).

    An answer loses `coef` times the KL of all its steps. After `per_step`, every step loses the
    summed KL from there to the end, as in REINFORCE++ (arXiv 2501.03262). Log-probabilities of the policy are
    those that the engine recorded. Put it after `total` and before the baseline.

    Args:
        coef: Weight of the KL, beta.
        against: Name of the other policy in `references`.
        estimator: With d = log pi - log pi_ref of a step: d (`k1`), d^2 / 2 (`k2`), exp(-d) + d - 1 (`k3`).
    """
    gap = table.notes["logp"] - table.notes[f"{against}/logp"]  # (N, T), NaN after the end of a row
    estimates = {"k1": gap, "k2": gap.square() / 2, "k3": torch.expm1(-gap) + gap}
    kl = estimates[estimator].nan_to_num()
    to_end = torch.cat([kl.flip(-1).cumsum(-1).flip(-1), kl.new_zeros(len(table), 1)], -1)  # (N, T + 1)
    starts = torch.cat([torch.zeros_like(table.ends[:, :1]), table.ends[:, :-1]], -1).clamp(0, kl.shape[1])
    return table.put(table.values - coef * to_end.gather(1, starts)[:, None])
