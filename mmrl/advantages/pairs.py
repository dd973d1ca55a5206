"""Advantage functions that make preference pairs of rewards."""

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
    """Set the best row of every group to 1 and the worst to -1, and drop the rest (DPO, arXiv 2305.18290).

    Groups whose best and worst rewards are equal are dropped. Of several best (worst) rows the first is
    taken. With several rewards, each makes pairs of its own.

    Args:
        margin: Drop groups whose best and worst rewards are at most this far apart.
        length_ratio: Drop pairs whose longer answer has more than this many times the steps of the shorter;
            0 accepts any lengths.
        by: Keys that define a group.
    """
    groups, index = table.groups(by), table.index(by)
    best, worst = groups.largest(), groups.smallest()
    apart = table.valid & (best - worst > max(margin, EQUAL))  # a margin of 0 leaves ties out as well
    # (N, R, K) running numbers of the entries, by which the first of equal rewards is found.
    order = torch.arange(index.numel(), dtype=best.dtype).view(index.shape)[:, None].expand_as(best)
    pair = torch.zeros_like(best)
    for sign, extreme in ((1.0, best), (-1.0, worst)):
        candidates = apart & (table.values == extreme)
        first = candidates & (order == GroupStatistics(order, candidates, index).smallest())
        pair = torch.where(first, sign, pair)
    if length_ratio:
        steps = table.length.double()[:, None, None].expand_as(pair)
        lengths = GroupStatistics(steps, pair != 0, index)  # of the two rows of a pair alone
        pair = torch.where(lengths.largest() <= length_ratio * lengths.smallest(), pair, 0.0)
    return table.replace(values=pair, learn=table.learn & pair.any(1))  # a row in the pair of any reward


@advantage
def bilevel_pairs(
    table: RewardTable,
    *,
    of: str,
    short: str,
    margin: NonNegativeFloat = 0.0,
    threshold: float = 0.5,
) -> RewardTable:
    """Prefer a style for each prompt, and short right answers within it (AdaR1, arXiv 2504.21659).

    Long thinking is preferred where its share of right answers exceeds that of the short style by more than
    `margin`, else the short style. A pair across styles is an answer of the preferred style and one of the
    other; a pair within it is its shortest and its longest right answer. Each is a group of its own, and all
    other rows are dropped. Our reading: one pair of each kind per prompt; the pair within comes first, the
    one across takes the first right answer that is left, or the first one, and the other style's first.

    Args:
        of: Name of the reward that says whether an answer is right.
        short: Name of the label that is above one half for answers of the short style, such as `skip_ratio`.
        margin: Advantage in accuracy that long thinking needs.
        threshold: An answer is right where the reward is larger than this.
    """
    right, style = table.at_end(of) > threshold, table.at_end(short)
    known = table.learn.any(-1) & ~table.at_end(of).isnan() & ~style.isnan()
    pair, across = torch.zeros(len(table), dtype=torch.float64), torch.zeros(len(table), dtype=torch.bool)
    for group in table.group[known].unique():
        inside = known & (table.group == group)
        long, brief = inside & (style <= 0.5), inside & (style > 0.5)
        share = [float(right[rows].double().mean()) if rows.any() else -1.0 for rows in (long, brief)]
        chosen, other = (long, brief) if share[0] - max(share[1], 0.0) > margin else (brief, long)
        good = (chosen & right).nonzero()[:, 0]
        good = good[table.length[good].argsort(stable=True)]
        if len(good) > 1 and table.length[good[0]] < table.length[good[-1]]:
            pair[good[0]], pair[good[-1]] = 1.0, -1.0
        left = (chosen & (pair == 0)).nonzero()[:, 0]
        if len(left) and other.any():
            first = left[right[left].long().argmax()]  # the first right one, else the first
            against = other.nonzero()[0, 0]
            pair[first], pair[against] = 1.0, -1.0
            across[first] = across[against] = True
    # The last bit tells the two pairs of a prompt apart; ids are hashes of 63 bits.
    ids = {**table.ids, "group": table.ids["group"] ^ across.long()[:, None]}
    answer = torch.arange(table.ends.shape[1]) == table.last[:, None]  # (N, K)
    values = (pair[:, None] * answer)[:, None].expand_as(table.values)
    return table.replace(values=values, ids=ids, learn=table.learn & (pair != 0)[:, None])


@advantage
def kto_kl_rows(table: RewardTable, *, tag: Tag = "unrelated") -> RewardTable:
    """Keep mismatched rows with advantage 0, to estimate KTO's reference point z_0 (arXiv 2402.01306).

    Rows with the tag are marked by the note `unrelated` in the step table: their implicit reward is
    measured, and not learned from.
    """
    mismatched = tagged_rows(table, tag)
    noted = mismatched.any(-1, keepdim=True).double().expand(len(table), table.longest)
    return table.note("unrelated", noted).replace(
        values=torch.where(mismatched[:, None], 0.0, table.values),
        valid=table.valid | mismatched[:, None],
        learn=table.learn | mismatched,  # a mask of 0 would leave nothing to measure
    )


def tagged_rows(table: RewardTable, tag: str) -> torch.Tensor:
    """Find the outcomes that carry a tag: (N, K) bool, all False where the table does not know the tag."""
    return (table.ids.get(tag, torch.zeros_like(table.ends)) != 0) & table.present
