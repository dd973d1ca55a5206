"""Access to notes, which are values per step that the engine recorded, for advantage functions."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.reward_table import ABSENT, RewardTable
from mmrl.core.tensor import group_index, pad_to


def row_mean(table: RewardTable, name: str) -> Tensor:
    """Average the values recorded as `name` over the steps of each row: (N,), NaN for a row without any."""
    return table.notes[name].nanmean(-1)


def holes(table: RewardTable, steps: int) -> Tensor:
    """Mark holes, which are steps that the policy did not choose, such as tool replies: (N, steps) bool.

    These steps have no `logp`; a row without any `logp`, such as a demonstration, has no holes.
    """
    inside = torch.arange(steps) < table.length[:, None]
    if "logp" not in table.notes:
        return torch.zeros_like(inside)
    chosen = inside & ~_of_width(table.notes["logp"], steps).isnan()
    return inside & ~chosen & chosen.any(-1, keepdim=True)


def hole_places(table: RewardTable) -> Tensor:
    """Mark the entries that are holes (see `holes`): (N, K) bool; False in rows without an entry per step."""
    places = table.ends.shape[1]
    steps = torch.arange(1, places + 1)
    by_step = table.ends == torch.where(steps <= table.length[:, None], steps, ABSENT)
    return holes(table, places) & by_step.all(-1, keepdim=True)


def noted(table: RewardTable, name: str) -> Tensor:
    """Return the values recorded as `name`, for a table that `per_step` expanded: (N, T), NaN in holes."""
    steps = table.ends.shape[1]
    return _of_width(table.notes[name], steps).masked_fill(holes(table, steps), torch.nan)


def next_noted(values: Tensor) -> Tensor:
    """Replace each NaN in `values` (N, T) by the next value of the same row; NaN stays if none follows."""
    back = values.flip(-1)
    places = torch.arange(back.shape[1]).expand_as(back)
    latest = torch.where(back.isnan(), -1, places).cummax(-1).values.clamp(min=0)
    return back.gather(1, latest).flip(-1)


def first_noted(table: RewardTable, name: str) -> Tensor:
    """Return the first value recorded as `name` in each row: (N, 1), NaN for a row without any."""
    return next_noted(pad_to(table.notes[name], 1, 1, torch.nan))[:, :1]


def _of_width(note: Tensor, steps: int) -> Tensor:
    # Notes are wider than the table if the longest row of the table was dropped.
    return pad_to(note, steps, 1, torch.nan)[:, :steps]


def label(table: RewardTable, name: str) -> Tensor:
    """Return the values of a reward or label, without weights: (N, 1, K), NaN for answers without one.

    A row has K answers. A label is a value that a piece computed for other pieces, and no reward.

    Raises `ValueError` for an unknown name.
    """
    if name not in table.scored:
        raise ValueError(f"no reward is called '{name}'; there are {', '.join(table.scored) or 'none'}")
    return table.scored[name][:, None]


def clusters(table: RewardTable, of: str, index: Tensor) -> Tensor:
    """Return the cluster number of each answer (N, K), where `index` (N, K) numbers the groups.

    Answers with the same value of the label `of` form a cluster; an answer without it is its own cluster.
    """
    number = label(table, of)[:, 0] + 0.0  # turns -0.0 into 0.0, so that both have the same bits
    alone = torch.where(number.isnan(), torch.arange(1, number.numel() + 1).view(number.shape), 0)
    bits = number.nan_to_num().view(torch.int64)  # equal bits for equal numbers
    return group_index([column.flatten() for column in (index, bits, alone)]).view(index.shape)


def tagged_as(table: RewardTable, tag: str) -> Tensor:
    """Return the hashed value of a tag: (N, K), 0 where it is missing; raises `ValueError` if all lack it."""
    return table.tag(tag)
