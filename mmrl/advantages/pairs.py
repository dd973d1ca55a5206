"""Advantage functions that turn rewards into preference pairs."""

from __future__ import annotations

import torch

from mmrl.config.ranges import NonNegativeFloat, Tag, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable


@advantage
def best_vs_worst(
    table: RewardTable,
    *,
    margin: NonNegativeFloat = 0.0,
    length_ratio: NonNegativeFloat = 0.0,
    by: Tags = ("group", "place"),
) -> RewardTable:
    """Set the best row of every group to 1, the worst to -1, and drop the rest (DPO, arXiv 2305.18290).

    Groups of equal rewards are dropped. If several rows tie for best or worst, the first one is used. With
    several rewards, each reward has its own pairs.

    Args:
        margin: Drop groups whose best and worst rewards are at most this far apart.
        length_ratio: Drop pairs whose longer answer has more than this times the shorter length; 0: no limit.
        by: Keys that define a group.
    """
    groups, index = table.groups(by), table.index(by)
    best, worst = groups.largest(), groups.smallest()
    apart = table.valid & (best - worst > max(margin, EQUAL))  # excludes groups of equal rewards, too
    # (N, R, K) the number of each entry, to find the first of several equal rewards.
    order = torch.arange(index.numel(), dtype=best.dtype).view(index.shape)[:, None].expand_as(best)
    pair = torch.zeros_like(best)
    for sign, extreme in ((1.0, best), (-1.0, worst)):
        candidates = apart & (table.values == extreme)
        first = candidates & (order == GroupStatistics(order, candidates, index).smallest())
        pair = torch.where(first, sign, pair)
    if length_ratio:
        steps = table.length.double()[:, None, None].expand_as(pair)
        lengths = GroupStatistics(steps, pair != 0, index)  # lengths of the two rows of a pair
        pair = torch.where(lengths.largest() <= length_ratio * lengths.smallest(), pair, 0.0)
    return table.replace(values=pair, learn=table.learn & pair.any(1))  # rows in a pair of any reward


@advantage
def pairs_with_ties(table: RewardTable, *, by: Tags = ("group", "place")) -> RewardTable:
    """Set the better of two rows to 1 and the worse to -1; a tie of two rows keeps both, with 0.

    A larger group keeps its best and its worst row, or none if all are equal. Every reward and label
    of a row is recorded as the note `reward/NAME`, for `bradley_terry`.

    Args:
        by: Keys that define a group.
    """
    pairs, groups = best_vs_worst(table, by=by), table.groups(by)
    tied = table.valid & (groups.count() == 2) & (groups.largest() - groups.smallest() <= EQUAL)
    for name in table.scored:
        pairs = pairs.note(f"reward/{name}", table.at_end(name)[:, None].expand(-1, table.longest))
    return pairs.replace(learn=pairs.learn | (table.learn & tied.any(1)))


@advantage
def kto_kl_rows(table: RewardTable, *, tag: Tag = "unrelated") -> RewardTable:
    """Keep answers to other prompts at advantage 0, to estimate KTO's z_0 (arXiv 2402.01306).

    Rows with the tag `tag` are such answers. z_0 is the reference point of the loss. The note
    `unrelated` tells the objective not to train on them.
    """
    mismatched = tagged_rows(table, tag)
    noted = mismatched.any(-1, keepdim=True).double().expand(len(table), table.longest)
    return table.note("unrelated", noted).replace(
        values=torch.where(mismatched[:, None], 0.0, table.values),
        valid=table.valid | mismatched[:, None],
        learn=table.learn | mismatched,  # without `learn` the objective would not see them
    )


def tagged_rows(table: RewardTable, tag: str) -> torch.Tensor:
    """Whether each outcome has a tag: (N, K) bool."""
    return (table.ids.get(tag, torch.zeros_like(table.ends)) != 0) & table.present
