"""Advantage functions that weigh groups by how many of their values count, and how certain they are."""

from __future__ import annotations

from torch import Tensor

from mmrl.advantages.notes import clusters
from mmrl.core.reward_table import GroupStatistics, RewardTable


def cluster_entropy(
    table: RewardTable, of: str, by: tuple[str, ...], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute each group's entropy over clusters of answers, and the number of its answers: (N, 1, K) each.

    `of` is a label that is equal for answers of one cluster; an answer without it is a cluster of its own.
    `weight` (N, 1, K) is the share of an answer in its group.
    """
    index, present = table.index(by), table.present[:, None]
    mass = GroupStatistics(weight, present, clusters(table, of, index)).sum()
    # - sum_c p_c log p_c, as a sum over answers: the shares of a cluster add up to its p_c.
    entropy = GroupStatistics(-weight * mass.clamp(min=1e-300).log(), present, index).sum()
    return entropy, GroupStatistics(weight, present, index).count()
