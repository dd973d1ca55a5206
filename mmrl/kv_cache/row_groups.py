"""Groups of rows that answer the same prompt, folded into the queries of one matrix product."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


def rank_equal(key: Tensor) -> Tensor:
    """Count, for every entry of a key (n,), the equal entries before it."""
    order = key.argsort(stable=True)  # equal entries become adjacent, in their old order
    ordered = key[order]
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    index = torch.arange(len(key), device=key.device)
    first = torch.where(starts, index, 0).cummax(0).values  # start of the run of equal entries
    return torch.empty_like(key).scatter_(0, order, index - first)  # back from sorted to original order


def group_slots(flags: Tensor, group: Tensor | None = None) -> Tensor:
    """List the slots of flagged tokens by prompt and group: (prompts, groups, n).

    `flags` (bool) and `group` (group numbers) are (prompts, tokens); without `group` there is one group.
    Groups of fewer than `n` tokens are padded with -1. Without flagged tokens the result is (prompts, 0, 0).
    """
    rows, slots = flags.nonzero(as_tuple=True)
    if not len(rows):
        return torch.full((len(flags), 0, 0), -1)
    number = torch.zeros_like(slots) if group is None else group[rows, slots]
    count = int(number.max()) + 1
    place = rank_equal(rows * count + number)  # index of a token in its group
    out = torch.full((len(flags), count, int(place.max()) + 1), -1)
    out[rows, number, place] = slots
    return out


class RowGroups:
    """The prompt that each row of a batch answers: `owner` (rows,) holds prompt indices below `count`."""

    def __init__(self, owner: Tensor, count: int) -> None:
        self.owner, self.count = owner, count

    def select(self, rows: Tensor) -> tuple[RowGroups, Tensor | None]:
        """Select rows by index; also return the prompts that still have rows, or None if all prompts do."""
        used, owner = torch.unique(self.owner[rows.to(self.owner.device)], return_inverse=True)
        return RowGroups(owner, len(used)), None if len(used) == self.count else used

    @cached_property
    def alone(self) -> bool:
        """Whether every prompt has exactly one row, in the order of prompts."""
        return torch.equal(self.owner, torch.arange(self.count, device=self.owner.device))

    @cached_property
    def _places(self) -> tuple[Tensor, int, bool]:
        """Each row's index in its group, the largest group size, and whether the layout is regular.

        The layout is regular if all groups have the same size and the rows are sorted by group.
        """
        place = rank_equal(self.owner.cpu()).to(self.owner.device)
        largest = int(place.max()) + 1
        even = torch.arange(self.count, device=self.owner.device).repeat_interleave(largest)
        return place, largest, torch.equal(self.owner, even)

    def fold(self, x: Tensor) -> Tensor:
        """Concatenate the queries of all rows of a prompt: (rows, heads, Q, *) to (prompts, heads, g * Q, *).

        One product with the keys of a prompt then serves all its rows. g is the size of the largest group;
        smaller groups are padded with 0.
        """
        if self.alone:
            return x
        place, largest, even = self._places
        if even:  # equal groups: a view instead of a copy
            out = x.reshape(self.count, largest, *x.shape[1:])
        else:
            out = x.new_zeros(self.count, largest, *x.shape[1:])
            out[self.owner, place] = x
        return out.transpose(1, 2).flatten(2, 3)  # (prompts, g, heads, Q, *) to (prompts, heads, g * Q, *)

    def unfold(self, x: Tensor) -> Tensor:
        """Invert `fold`: (prompts, heads, g * Q, *) to (rows, heads, Q, *)."""
        if self.alone:
            return x
        place, largest, even = self._places
        out = x.reshape(*x.shape[:2], largest, -1, *x.shape[3:]).transpose(1, 2)  # (prompts, g, heads, Q, *)
        return out.flatten(0, 1) if even else out[self.owner, place]

    def tile(self, mask: Tensor, times: int) -> Tensor:
        """Repeat a mask (prompts, 1, t, n) for the folded queries of `times` query heads and all rows."""
        return mask.repeat(1, 1, times if self.alone else self._places[1] * times, 1)
