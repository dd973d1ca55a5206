"""DCPO (arXiv 2601.12730): mix in REINFORCE for a hotter or colder policy to control entropy.

Title: Distribution-Centric Policy Optimization Dominates Exploration-Exploitation Trade-off
Formula: A' = (1 - a) A + a b exp(logp_T - logp), a = x / (1 + x), x = min(|target - H|, limit) / share of
right answers.
Our reading: without a right answer nothing is mixed; the code divides by 0.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(others={"old"}, of_others={"logp_hot", "logp_cold"})
def hot_mix(
    table: RewardTable,
    *,
    of: str,
    entropy: NonNegativeFloat = 0.0,
    target: NonNegativeFloat = 0.25,
    limit: NonNegativeFloat = 0.1,
    threshold: float = 0.05,
) -> RewardTable:
    """Mix REINFORCE for a hotter or colder policy into advantages, to hold an entropy (DCPO).

    A step's advantage becomes (1 - a) A + a b exp(logp_T - logp), where b is 1 for a right answer. T is the
    policy's `hot_temperature` while the entropy is at most the target, else its `cold_temperature`. The
    weight a = x / (1 + x) with x = min(|target - entropy|, limit) / f, where f is the share of right answers;
    without one nothing changes (code of 597358816/DCPO). Put it last.

    Args:
        of: Name of the reward that says whether an answer is right.
        entropy: Entropy of the policy: `{name: last_metric, metrics: [entropy]}`. 0 is no past, and changes
            nothing.
        target: Entropy to hold, in nats (H0).
        limit: Largest distance to the target that counts.
        threshold: An answer is right where the reward is larger than this.
    """
    right = table.at_end(of) > threshold  # (N,), False where the reward does not apply
    known = ~table.at_end(of).isnan()
    table = per_step(table)
    if entropy <= 0 or not right.any():
        return table
    weight = min(abs(target - entropy), limit) / float(right[known].double().mean())
    weight = weight / (1 + weight)
    tempered = noted(table, "old/logp_hot" if entropy <= target else "old/logp_cold")
    gain = (tempered - noted(table, "old/logp")).clamp(max=20.0).exp().nan_to_num() * right[:, None]
    mixed = (1 - weight) * table.values + weight * gain[:, None]
    return table.put(torch.where(table.valid, mixed, table.values))
