"""GTPO (arXiv 2508.03772): spare the tokens that good and bad answers have in common at their ends.

Title: GTPO: Trajectory-Based Policy Optimization in Large Language Models
Formula: A' = lambda (A - c H) / n, lambda 2 or 0 for a token in conflict and 1 elsewhere, H the entropy of
the row, n its number of tokens in conflict.
Our reading: rows with advantage 0 cause no conflicts but have the entropy penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.notes import noted, row_mean
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable
from mmrl.core.tensor import group_count


@advantage(notes={"token", "entropy"})
def conflict_tokens(
    table: RewardTable,
    *,
    positive: NonNegativeFloat = 2.0,
    negative: NonNegativeFloat = 0.0,
    entropy_coef: NonNegativeFloat = 0.1,
    per_conflict: bool = True,
) -> RewardTable:
    """Spare tokens that good and bad answers share at their start or end (GTPO, arXiv 2508.03772).

    A token is in conflict where, at the same place, it occurs with an advantage above 0 and with one below
    0; places are counted from the start and from the end, and only the unbroken run from there counts. An
    advantage A becomes lambda (A - entropy_coef H) / max(n, 1), where H is the row's mean entropy and n its
    number of tokens in conflict. Rows of advantage 0 make no conflicts, and pay for their entropy alike.
    Departs: the released code counts fewer tokens in conflict, because it joins the two runs with the second
    still reversed.

    Args:
        positive: Factor of a token in conflict with an advantage above 0, once from the start and once from
            the end.
        negative: The same for an advantage below 0.
        entropy_coef: Cost of the row's mean entropy in nats, in units of advantage.
        per_conflict: Divide by n, as the code does.
    """
    table = per_step(table)
    token = noted(table, "token")
    known = table.present & ~token.isnan()
    # Steps with a token come first: one without (of a tool) neither breaks a run nor has a place.
    order = (~known).long().sort(dim=-1, stable=True).indices
    token, back, length = token.gather(1, order), order.argsort(-1), known.sum(-1, keepdim=True)
    places = torch.arange(token.shape[1]).expand_as(token)
    mirrored = (length - 1 - places).clamp(min=0)  # the same place counted from the end of its own row
    entropy = row_mean(table, "entropy").nan_to_num()[:, None]
    columns = []
    for values, valid in zip(table.values.unbind(1), table.valid.unbind(1), strict=True):
        sign = torch.where(valid & known, values, 0.0).sign()
        first = sign.gather(1, order)
        forward = _run(_conflicts(table, token, first, places)).gather(1, back)
        backward = _conflicts(table, token, first, mirrored).gather(1, mirrored)  # from the end on
        backward = _run(backward).gather(1, mirrored).gather(1, back) & known
        factor = torch.where(sign > 0, positive, negative)
        weight = torch.where(forward, factor, 1.0) * torch.where(backward, factor, 1.0)
        number = (forward | backward).sum(-1, keepdim=True).clamp(min=1) if per_conflict else 1
        columns.append(weight * (values - entropy_coef * entropy) / number)
    return table.put(torch.stack(columns, 1))


def _conflicts(table: RewardTable, token: Tensor, sign: Tensor, places: Tensor) -> Tensor:
    """Mark tokens that occur with both signs at one place of a group: (N, T) bool."""
    if not token.numel():
        return torch.zeros_like(token, dtype=torch.bool)
    group = table.ids["group"].unique(return_inverse=True)[1]
    number = token.nan_to_num(nan=-1.0).long() + 1
    # One key of group, place and token, because rows of three columns are sorted ten times as slowly.
    key = (group * token.shape[1] + places) * (number.max() + 1) + number
    index = key.flatten().unique(return_inverse=True)[1]
    both = (group_count(index, sign.flatten() > 0) > 0) & (group_count(index, sign.flatten() < 0) > 0)
    return both.view(sign.shape) & (sign != 0)


def _run(mask: Tensor) -> Tensor:
    """Keep the leading run of True in every row."""
    return mask.long().cumprod(-1).bool()
