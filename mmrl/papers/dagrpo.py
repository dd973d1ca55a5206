"""DaGRPO (arXiv 2512.06337): drop answers that resemble an answer of the opposite correctness.

Title: DaGRPO: Rectifying Gradient Conflict in Reasoning via Distinctiveness-Aware Group Relative Policy
Optimization
Formula: keep where max |s - s'| >= tau over the answers s' on the other side of right and wrong.
Our reading: throughout, since only the abstract was read.
"""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable


@advantage
def distinct(
    table: RewardTable,
    *,
    of: str,
    right: str,
    threshold: float = 0.5,
    tau: NonNegativeFloat = 0.15,
    strict: bool = False,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Drop answers that hardly differ from one on the other side of right and wrong (DaGRPO).

    Our reading of arXiv 2512.06337, of which only the abstract was read: an answer with fine score s is kept
    where the farthest answer of the other side is at least `tau` away, with `strict` where the closest is.
    Where the group has no other side, all are kept. Put it after `group_normalize`.

    Args:
        of: Name of the fine score, a reward or label between 0 and 1.
        right: Name of the reward that tells right answers from wrong ones.
        threshold: An answer is right above this reward.
        tau: Smallest distance of fine scores.
        strict: Look at the closest answer of the other side instead of the farthest.
        by: Keys that define a group.
    """
    score, side, index = label(table, of), label(table, right), table.index(by)
    known = ~(score.isnan() | side.isnan())
    good = side > threshold
    kept = torch.ones_like(known)
    for mine in (good, ~good):
        others = GroupStatistics(score, known & ~mine, index)
        low, high = others.smallest(), others.largest()
        if strict:
            apart = _closest(score, known & ~mine, index) >= tau - EQUAL
        else:
            apart = torch.maximum((score - low).abs(), (score - high).abs()) >= tau - EQUAL
        kept = torch.where(known & mine, apart | low.isinf(), kept)
    return table.replace(learn=table.learn & kept[:, 0])


def _closest(score: torch.Tensor, others: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Measure the distance of each score to the closest of `others` in its group; infinite without any."""
    closest = torch.full_like(score, torch.inf)
    for group in index.unique():
        inside = (index == group)[:, None]
        away = (score[inside][:, None] - score[inside & others]).abs()
        if away.numel():
            closest[inside] = away.amin(1)
    return closest
