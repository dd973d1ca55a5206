"""GRPO-N (arXiv 2510.04028): learn only from answers that are worse than their group.

Title: The Debate on RLVR Reasoning Capability Boundary: Shrinkage, Expansion, or Both? A Two-Stage Dynamic
View
Formula: A' = min(A, 0), or w A where A > 0.
Our reading: rows without a negative advantage stay in every denominator.
"""

from __future__ import annotations

import torch

from mmrl.config.ranges import Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def negative_only(table: RewardTable, *, positive_weight: Probability = 0.0) -> RewardTable:
    """Learn from advantages below 0 alone, or weigh those above 0 by less (GRPO-N, arXiv 2510.04028).

    Rows without a negative advantage stay in every denominator: our reading.
    """
    return table.put(torch.where(table.values > 0, positive_weight * table.values, table.values))
