"""HiPRAG (arXiv 2510.07794): a bonus for good search steps if answer and format are right.

Title: HiPRAG: Hierarchical Process Rewards for Efficient Agentic Retrieval Augmented Generation
Formula: r = (1 - w) A + w F + b [A = F = 1] (share of good steps).
Our reading: no bonus where the share is unknown.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, RewardTable


@advantage
def gated_bonus(
    table: RewardTable,
    *,
    of: str,
    format: str,
    share: str,
    format_weight: Probability = 0.2,
    bonus_weight: NonNegativeFloat = 0.4,
) -> RewardTable:
    """Pay for good steps only once answer and format are right (HiPRAG, arXiv 2510.07794).

    (1 - format_weight) A + format_weight F, and bonus_weight times the share of good steps where both A and F
    are 1; nothing is added where that share is not known. It stands for `total`.

    Args:
        of: Name of the reward A of the answer, from 0 to 1.
        format: Name of the reward or label F of the format, from 0 to 1.
        share: Name of the label with the share of good steps, such as a judge's, from 0 to 1.
        format_weight: The paper's 0.2.
        bonus_weight: The paper's 0.4.
    """
    right, good, steps = label(table, of), label(table, format), label(table, share)
    gate = (right >= 1 - EQUAL) & (good >= 1 - EQUAL)
    base = (1 - format_weight) * right + format_weight * good
    earned = base + torch.where(gate, bonus_weight * steps.nan_to_num(), 0.0)
    return table.replace(values=earned.nan_to_num(), valid=~earned.isnan(), weights={"total": 1.0})
