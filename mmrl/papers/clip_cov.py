"""Clip-Cov (arXiv 2505.22617): exclude a few random steps where log-probability and advantage covary.

Title: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models
Formula: A = 0 for a random `share` of the steps with low < (A - mean A) (logp - mean logp) < high.
Our reading: the log-probabilities are noted while sampling.
"""

from __future__ import annotations

import torch

from mmrl.advantages.select import per_step
from mmrl.advantages.tokens import covariance_of_steps
from mmrl.config.ranges import Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream


@advantage(notes={"logp"})
def covariance_mask(
    table: RewardTable,
    *,
    share: Probability = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    stream: Stream,
) -> RewardTable:
    """Set the advantage of a few random steps of high covariance to 0 (Clip-Cov, arXiv 2505.22617).

    The covariance of a step is (A - mean A) (logp - mean logp) over the collection. Our reading: the
    log-probability is the one that was noted when sampling, which is the policy's own at its first update.

    Args:
        share: Share of the collection's steps that is set to 0; at least one step, where there is any.
        low: Smallest covariance of such a step.
        high: Largest covariance of such a step.
    """
    table = per_step(table)
    covariance, known = covariance_of_steps(table)
    candidates = (known & (covariance > low) & (covariance < high)).nonzero()
    number = max(1, int(share * int(known.sum())))
    order = torch.randperm(len(candidates), generator=stream.generator("covariance_mask"))
    values = table.values.clone()
    values[tuple(candidates[order[:number]].T)] = 0.0
    return table.put(values)
