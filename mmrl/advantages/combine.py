"""Entropy of a group over clusters of equal answers."""

from __future__ import annotations

from torch import Tensor

from mmrl.advantages.notes import clusters
from mmrl.core.reward_table import GroupStatistics, RewardTable


def cluster_entropy(
    table: RewardTable, of: str, by: tuple[str, ...], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute each group's entropy over clusters of answers, and its number of answers: (N, 1, K) each.

    Answers with the same value of the label `of` form a cluster; an answer without it is its own cluster.
    `weight` (N, 1, K) is the probability of an answer in its group, for N rows with K outcomes.
    """
    index, present = table.index(by), table.present[:, None]
    mass = GroupStatistics(weight, present, clusters(table, of, index)).sum()
    # -sum_c p_c log p_c as a sum over answers, whose weights in cluster c add up to p_c.
    entropy = GroupStatistics(-weight * mass.clamp(min=1e-300).log(), present, index).sum()
    return entropy, GroupStatistics(weight, present, index).count()
