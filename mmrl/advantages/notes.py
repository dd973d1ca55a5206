"""What the engine noted on steps, laid out for advantage functions."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.reward_table import ABSENT, RewardTable
from mmrl.core.tensor import group_index, pad_to


def row_mean(table: RewardTable, name: str) -> Tensor:
    """Average a note over the steps of each row: (N,), NaN where nothing was noted."""
    return table.notes[name].nanmean(-1)


def holes(table: RewardTable, steps: int) -> Tensor:
    """Mark steps inside a row that the policy did not choose, such as a text of the engine: (N, steps).

    An engine leaves their `logp` out; a row without any, such as a demonstration, has no holes.
    """
    inside = torch.arange(steps) < table.length[:, None]
    if "logp" not in table.notes:
        return torch.zeros_like(inside)
    chosen = inside & ~_of_width(table.notes["logp"], steps).isnan()
    return inside & ~chosen & chosen.any(-1, keepdim=True)


def hole_places(table: RewardTable) -> Tensor:
    """Mark the entries of holes in rows that went through `per_step`: (N, K), nothing in other rows."""
    places = table.ends.shape[1]
    steps = torch.arange(1, places + 1)
    by_step = table.ends == torch.where(steps <= table.length[:, None], steps, ABSENT)
    return holes(table, places) & by_step.all(-1, keepdim=True)


def noted(table: RewardTable, name: str) -> Tensor:
    """Lay a note out over the places of a table that went through `per_step`: (N, T), NaN in holes too."""
    steps = table.ends.shape[1]
    return _of_width(table.notes[name], steps).masked_fill(holes(table, steps), torch.nan)


def next_noted(values: Tensor) -> Tensor:
    """Give steps without a value (N, T) that of the next one with a value; NaN where none follows."""
    back = values.flip(-1)
    places = torch.arange(back.shape[1]).expand_as(back)
    latest = torch.where(back.isnan(), -1, places).cummax(-1).values.clamp(min=0)
    return back.gather(1, latest).flip(-1)


def first_noted(table: RewardTable, name: str) -> Tensor:
    """Return a note of the first step of each row that has it: (N, 1), NaN where none has."""
    return next_noted(pad_to(table.notes[name], 1, 1, torch.nan))[:, :1]


def _of_width(note: Tensor, steps: int) -> Tensor:
    # Notes keep the width of the longest row that was collected, which may have been dropped since.
    return pad_to(note, steps, 1, torch.nan)[:, :steps]


def label(table: RewardTable, name: str) -> Tensor:
    """Find a reward or label as measured: (N, 1, K), NaN where it does not apply.

    Raises `ValueError` where there is none of that name.
    """
    if name not in table.scored:
        raise ValueError(f"no reward is called '{name}'; there are {', '.join(table.scored) or 'none'}")
    return table.scored[name][:, None]


def clusters(table: RewardTable, of: str, index: Tensor) -> Tensor:
    """Number the clusters of answers within the groups of `index` (N, K): (N, K).

    `of` is a label that is equal for answers of one cluster; an answer without it is a cluster of its own.
    """
    number = label(table, of)[:, 0] + 0.0  # no -0.0, whose bits differ from those of 0.0
    alone = torch.where(number.isnan(), torch.arange(1, number.numel() + 1).view(number.shape), 0)
    bits = number.nan_to_num().view(torch.int64)  # equal where the numbers are, which no rounding changes
    return group_index([column.flatten() for column in (index, bits, alone)]).view(index.shape)


def tagged_as(table: RewardTable, tag: str) -> Tensor:
    """Return the hashed words of a tag: (N, K), 0 where there is none.

    Raises `ValueError` where no outcome has the tag.
    """
    return table.tag(tag)
