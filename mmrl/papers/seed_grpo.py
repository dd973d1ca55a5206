"""SEED-GRPO (arXiv 2505.12346): prompts whose answers have a high semantic entropy weigh less.

Title: SEED-GRPO: Semantic Entropy Enhanced GRPO for Uncertainty-Aware Policy Optimization
Formula: A f(alpha SE / log G), SE the entropy of the group over clusters of equal answers.
Our reading: the default form and alpha, from a port of the code; an answer without a cluster is its own
cluster.
"""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.advantages.combine import cluster_entropy
from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import row_mean
from mmrl.config.ranges import NonNegativeFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


@advantage(notes={"logp"})
def semantic_entropy(
    table: RewardTable,
    *,
    of: str,
    alpha: NonNegativeFloat = 0.0417,
    form: Literal["reciprocal", "linear", "exponential"] = "reciprocal",
    mass: Literal["probability", "count"] = "probability",
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Shrink the advantages of groups whose answers disagree in meaning (SEED-GRPO, arXiv 2505.12346).

    The factor is f(alpha SE / log G), where SE is the entropy of the group over clusters of equal answers
    and G its number of answers; 1 for a group of one. Our readings: the default form and alpha, which a
    port of the code has, and each answer without a cluster is one of its own.

    Args:
        of: Name of the label that is equal for answers of one cluster, such as `answer_cluster`.
        alpha: Strength.
        form: f(x) is 1 / (1 + x) (`reciprocal`), 1 - x (`linear`, at least 0) or exp(-x) (`exponential`).
        mass: An answer counts by its share of the group's softmax of mean log-probabilities
            (`probability`), or all count alike (`count`), as they do where none was noted.
        by: Keys that define a group.
    """
    index, present = table.index(by), table.present[:, None]
    logp = row_mean(table, "logp")[:, None, None].expand(present.shape)
    if mass == "count":
        logp = torch.zeros_like(logp)
    known = GroupStatistics(logp, present & ~logp.isnan(), index)
    # A demonstration has no log-probabilities: it counts as an answer of the mean one.
    logp = torch.where(logp.isnan(), known.mean(), logp)
    largest = GroupStatistics(logp, present, index).largest()
    share = torch.where(present, (logp - largest).exp(), 0.0)
    share = share / GroupStatistics(share, present, index).sum().clamp(min=1e-300)
    entropy, count = cluster_entropy(table, of, by, share)
    x = alpha * torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)
    factor = {"reciprocal": 1 / (1 + x), "linear": (1 - x).clamp(min=0), "exponential": (-x).exp()}[form]
    return table.put(table.values * factor)
