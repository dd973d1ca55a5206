"""Advantage functions that choose which rows of a group are learned from."""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, PositiveInt, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable


@advantage
def most_varied(table: RewardTable, *, keep: PositiveInt, by: Tags = BY_GROUP) -> RewardTable:
    """Learn from the `keep` rows of a group whose advantages vary most (D3S, arXiv 2509.22115).

    They are some of the largest and some of the smallest. Groups of equal advantages are dropped as a whole
    (they have nothing to vary); smaller groups are kept. With `by: []` one choice is made over the
    collection. Put it after `group_normalize`; our reading: of equal advantages the last rows are among the
    largest, and of several splits of equal variance the one with the fewest of the largest is taken.
    """
    groups = table.groups(by)
    rank, count = groups.rank(), groups.count().long()
    best, chosen = torch.full_like(table.values, -torch.inf), torch.zeros_like(table.valid)
    for top in range(keep + 1):
        members = table.valid & ((rank < keep - top) | (rank >= count - top))
        variance = GroupStatistics(table.values, members, groups.index).std(unbiased=False)
        better = variance > best + 1e-12 * best.abs().nan_to_num(posinf=0.0)  # not by rounding alone
        best = torch.where(better, variance, best)
        chosen = torch.where(better, members, chosen)
    chosen = torch.where(count <= keep, table.valid, chosen) & ~groups.flat()
    return table.replace(learn=table.learn & chosen.any(1))


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
