"""Preference pairs out of rewards, and the rows that some comparisons want beside them."""

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
    """Set the best of every group to 1 and the worst to -1, and do not learn from the rest: preference pairs
    (DPO, arXiv 2305.18290).

    A group in which best and worst are equal, or not more than `margin` apart, is not learned from; nor, with
    a `length_ratio`, one in which the longer of them has more than so many times the steps of the shorter. Of
    several that are best (worst) the first is taken. Of several rewards each makes pairs of its own.
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
    """Make the spoilt twin of every best row another worse one, and learn from no other twin (mDPO, arXiv
    2406.11839).

    A twin carries the tag. It stands behind `best_vs_worst` whose `by` names the tag, so that twins are
    compared among themselves and the best of them is the twin of the best.
    """
    twin = _tagged(table, tag)
    values = torch.where(twin[:, None], -table.values.clamp(min=0), table.values)
    return table.replace(values=values, learn=table.learn & (~twin | (values < 0).any(1)))


@advantage
def kto_kl_rows(table: RewardTable, *, tag: str = "unrelated") -> RewardTable:
    """Keep rows with a tag in the step table, with the advantage 0 and noted as unrelated: what they gain is
    measured, and not learned from (KTO's z_0, arXiv 2402.01306)."""
    aside = _tagged(table, tag)
    steps = int(table.length.max()) if len(table) else 0
    noted = aside.any(-1, keepdim=True).double().expand(len(table), steps)
    return table.note("unrelated", noted).replace(
        values=torch.where(aside[:, None], 0.0, table.values),
        valid=table.valid | aside[:, None],
        learn=table.learn | aside,
    )


def _tagged(table: RewardTable, tag: str) -> torch.Tensor:
    """Find the outcomes that carry a tag: (N, K). Where none does, the table does not know it."""
    return (table.ids.get(tag, torch.zeros_like(table.ends)) != 0) & table.present
