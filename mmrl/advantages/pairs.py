"""Advantage functions that make preference pairs of rewards."""

from __future__ import annotations

import torch

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, RewardTable
from mmrl.core.tensor import group_extreme


@advantage
def best_vs_worst(
    table: RewardTable,
    *,
    margin: NonNegativeFloat = 0.0,
    length_ratio: NonNegativeFloat = 0.0,
    by: tuple[str, ...] = ("group", "place"),
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
    rows, rewards, places = table.values.shape
    index = table.index(by).flatten()
    value = table.values.transpose(1, 2).reshape(rows * places, rewards)
    known = table.valid.transpose(1, 2).reshape(value.shape) & table.present.flatten()[:, None]
    best, worst = (group_extreme(value, index, known, largest) for largest in (True, False))
    apart = best - worst > max(margin, EQUAL)
    order = torch.arange(len(value), dtype=value.dtype)[:, None].expand_as(value)
    pair = torch.zeros_like(value)
    for sign, extreme in ((1.0, best), (-1.0, worst)):
        candidates = known & apart & (value == extreme)
        first = candidates & (order == group_extreme(order, index, candidates, largest=False))
        pair = torch.where(first, sign, pair)
    if length_ratio:
        steps = table.length.double()[:, None].expand(rows, places).reshape(-1, 1).expand_as(value)
        longest, shortest = (group_extreme(steps, index, pair != 0, largest) for largest in (True, False))
        pair = torch.where(longest <= length_ratio * shortest, pair, 0.0)
    pair = pair.view(rows, places, rewards).transpose(1, 2)
    return table.replace(values=pair, learn=table.learn & pair.any(1))


@advantage
def corrupted_as_rejected(table: RewardTable, *, tag: str = "twin") -> RewardTable:
    """Use the corrupted copy of every best row as a further rejected row (mDPO, arXiv 2406.11839).

    All other corrupted copies are dropped. Put it after `best_vs_worst` with `tag` among its `by`, which
    compares the corrupted copies among themselves: the best of them is the copy of the best row.
    """
    twin = _tagged(table, tag)
    values = torch.where(twin[:, None], -table.values.clamp(min=0), table.values)
    return table.replace(values=values, learn=table.learn & (~twin | (values < 0).any(1)))


@advantage
def kto_kl_rows(table: RewardTable, *, tag: str = "unrelated") -> RewardTable:
    """Keep mismatched rows with advantage 0, to estimate KTO's reference point z_0 (arXiv 2402.01306).

    Rows with the tag are marked by the note `unrelated` in the step table: their implicit reward is
    measured, and not learned from.
    """
    mismatched = _tagged(table, tag)
    steps = int(table.length.max()) if len(table) else 0
    noted = mismatched.any(-1, keepdim=True).double().expand(len(table), steps)
    return table.note("unrelated", noted).replace(
        values=torch.where(mismatched[:, None], 0.0, table.values),
        valid=table.valid | mismatched[:, None],
        learn=table.learn | mismatched,
    )


def _tagged(table: RewardTable, tag: str) -> torch.Tensor:
    """Find the outcomes that carry a tag: (N, K) bool, all False where the table does not know the tag."""
    return (table.ids.get(tag, torch.zeros_like(table.ends)) != 0) & table.present
