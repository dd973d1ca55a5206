"""D3S (arXiv 2509.22115): learn from the subset of each group with the largest variance of advantages.

Title: Learning More with Less: A Dynamic Dual-Level Down-Sampling Framework for Efficient Policy
Optimization
Formula: S = argmax over subsets of `keep` rows of Var(A).
Our reading: of equal advantages the last rows are among the largest; of equal variances the fewest of the
largest. Steps are chosen by `keep_steps`.
"""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import PositiveInt, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


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
