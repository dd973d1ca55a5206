"""Stages: layers between two token reductions, which share the rows and columns of their attention.

All layers of a stage have the same visual tokens, so their cache layers have the same columns; other stages
have others. The position and kind of every column is stored in extra layers after the model's own ones in the
same cache, so that every rearrangement of the cache (beams, repeats, crops, selected rows) applies to them
too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmrl.compression.pruning.patch_grid import TokenLayout, pack_places, pick
from mmrl.compression.pruning.sliced_linear import FeatureIndex


@dataclass(frozen=True, eq=False)
class TokenStage:
    """Rows and columns of attention of one stage: `S` tokens in this call, `C` columns with past ones.

    `text` (B, n_t) and `vis` (B, n_v) index tokens of this call; `cols` (B, n_c) those that become columns,
    in the order of the sequence; -1 pads on the left. `orig` (B, C) numbers columns in the whole sequence,
    `visual` (B, C) marks visual ones, `seen` (B, C) those that are not padding.
    """

    text: Tensor
    vis: Tensor
    cols: Tensor
    orig: Tensor
    visual: Tensor
    seen: Tensor
    past: int  # tokens of the whole sequence before this call
    allowed: Tensor | None  # (B, S, past + S) mask of all pairs, if the caller passed one
    layout: TokenLayout
    plain: bool  # no padding and no past: the mask is just causal
    memo: dict[Any, Tensor] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[tuple[bool, int, int, int]] | None:
        """Split the new columns into contiguous runs: `(visual, first row, first column, length)`.

        None if rows of the batch differ or are padded.
        """
        if int(min(x.min() if x.numel() else 0 for x in (self.text, self.vis, self.cols))) < 0:
            return None
        line = self.gather[0]
        if not len(line) or not bool((self.gather == line).all()):
            return None
        breaks = ((line[1:] - line[:-1]) != 1).nonzero()[:, 0].tolist()
        starts, n = [0, *(at + 1 for at in breaks)], self.text.shape[1]
        ends, rows = [*starts[1:], len(line)], line.tolist()
        return [
            (rows[a] >= n, rows[a] - n if rows[a] >= n else rows[a], a, b - a)
            for x, y in zip(starts, ends, strict=True)
            for a, b in _split(rows, x, y, n)
        ]

    def bias(self, name: Any, make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """Convert a mask to an additive bias (0 or -inf), once for all layers of the stage."""

        def added() -> Tensor:
            mask = make()
            nothing = torch.zeros((), dtype=dtype, device=mask.device)
            return torch.where(mask, nothing, float("-inf"))

        return self.once((name, dtype), added)

    def once(self, name: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return a memoised value, computed once for all layers of the stage."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]

    @cached_property
    def any_visual(self) -> bool:
        """Whether a column is visual."""
        return bool(self.visual.any())

    def join(self, text: Tensor, vis: Tensor, heads: FeatureIndex, total: int) -> Tensor:
        """Merge text rows (B, H, n_t, D) and visual rows (B, h, n_v, D) in the order of the new columns.

        `heads` are those of `total` that the visual rows have; the other heads of visual rows are zero.
        """
        size = text.shape[-1]
        if self.runs is None:
            vis = vis if heads is None else _spread(vis, heads, total)
            return pick(torch.cat([text, vis], 2), self.gather, 2)
        shape = (len(text), total, self.cols.shape[1], size)
        out = text.new_empty(shape) if heads is None else text.new_zeros(shape)
        for visual, row, column, length in self.runs:
            if visual:
                to = slice(None) if heads is None else heads
                out[:, to, column : column + length] = vis[:, :, row : row + length]
            else:
                out[:, :, column : column + length] = text[:, :, row : row + length]
        return out

    @cached_property
    def gather(self) -> Tensor:
        """Index of every new column in the concatenated text and visual rows: (B, n_c)."""
        return pick(self._inverse(torch.cat([self.text, self.vis], 1)), self.cols)

    def _inverse(self, index: Tensor) -> Tensor:
        """Invert `index` (B, n): the place in it of every token of this call, (B, S)."""
        size = self.layout.visual.shape[1]
        order = torch.arange(index.shape[1], device=index.device).expand_as(index)
        # The extra last entry takes the padding (-1).
        places = index.new_zeros(len(index), size + 1)
        places.scatter_(1, index.masked_fill(index < 0, size), order)
        return places[:, :size]

    @cached_property
    def text_at(self) -> Tensor:
        """Column of every text row: (B, n_t)."""
        return self._inverse(self.cols).gather(1, self.text.clamp(min=0))

    @cached_property
    def vis_at(self) -> Tensor:
        """Column of every visual row: (B, n_v)."""
        return self._inverse(self.cols).gather(1, self.vis.clamp(min=0))

    def mask(self, rows: Tensor, *, text_only: bool = False) -> Tensor:
        """Compute which columns the rows (B, n) of this call attend to: (B, 1, n, C).

        A fully masked row (padding) attends everywhere, so that its softmax is defined.
        """
        at = rows.clamp(min=0) + self.past
        see = self.seen[:, None] & (self.orig[:, None] <= at[:, :, None])
        if self.allowed is not None:
            lines = pick(self.allowed, rows)
            see = see & pick(lines, self.orig, dim=2)
        if text_only:
            see = see & ~self.visual[:, None]
        return (see | ~see.any(-1, keepdim=True))[:, None]

    @cached_property
    def text_mask(self) -> Tensor | None:
        """Attention mask of text rows; None if they attend to all columns."""
        mask = self.mask(self.text)
        return None if self.text.shape[1] == 1 and bool(mask.all()) else mask

    @cached_property
    def text_only_mask(self) -> Tensor:
        """Attention mask of text rows to text columns: (B, 1, n_t, C)."""
        return self.mask(self.text, text_only=True)

    @cached_property
    def words(self) -> tuple[Tensor, Tensor]:
        """Text columns before visual rows, (B, t) padded with -1, and a mask per visual row (B, n_v, t)."""
        at = self.vis.clamp(min=0) + self.past
        last = at.masked_fill(self.vis < 0, -1).max(1).values
        columns = pack_places(~self.visual & self.seen & (self.orig < last[:, None]))
        orig = pick(self.orig, columns)
        before = orig[:, None] < at[:, :, None]
        if self.allowed is not None:
            before = before & pick(pick(self.allowed, self.vis), orig, dim=2)
        return columns, before & (columns >= 0)[:, None]

    @cached_property
    def dense_mask(self) -> Tensor:
        """Attention mask of all tokens of this call that are columns: (B, 1, n_c, C)."""
        return self.mask(self.cols)

    @cached_property
    def all_text(self) -> bool:
        """Whether the new columns are exactly the text rows, in order."""
        return (
            self.vis.shape[1] == 0
            and self.text.shape == self.cols.shape
            and bool((self.text == self.cols).all())
        )


def _split(rows: list[int], start: int, end: int, n: int) -> list[tuple[int, int]]:
    """Split a run at the boundary of text and visual rows, whose indices are consecutive (n_t - 1, n_t)."""
    edge = start + (n - rows[start])
    return [(start, edge), (edge, end)] if rows[start] < n and start < edge < end else [(start, end)]


def _spread(x: Tensor, heads: FeatureIndex, total: int) -> Tensor:
    out = x.new_zeros(x.shape[0], total, *x.shape[2:])
    out[:, heads] = x
    return out


class ColumnIndex:
    """Position and kind of the columns of every stage, in the extra cache layers from `first` on."""

    def __init__(self, cache: Any, first: int) -> None:
        self.cache, self.first = cache, first

    def extend(self, number: int, orig: Tensor, visual: Tensor) -> tuple[Tensor, Tensor]:
        """Append new columns (B, n) of a stage; returns positions and visual marks of all its columns."""
        if self.cache is None:
            return orig, visual
        layer = self._layer(number)
        keys, values = layer.update(orig[:, None, :, None], visual[:, None, :, None])
        return keys[:, 0, :, 0], values[:, 0, :, 0].bool()

    def length(self) -> int:
        """Count the tokens of the whole sequence so far."""
        return 0 if self.cache is None or not self.cache.get_seq_length() else self._layer(0).get_seq_length()

    def _layer(self, number: int) -> Any:
        from transformers.cache_utils import DynamicLayer

        while len(self.cache.layers) <= self.first + number:
            self.cache.layers.append(DynamicLayer())
        return self.cache.layers[self.first + number]


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """Inputs of one call of the language model, before any token reduction."""

    layout: TokenLayout
    columns: ColumnIndex
    past: int
    known: Tensor | None  # (B, past + S), True for tokens that are not padding
    allowed: Tensor | None  # (B, S, past + S)

    def stage(self, number: int, vis: Tensor) -> TokenStage:
        """Build stage `number` with the visual rows that are left."""
        visual = self.layout.visual
        size = visual.shape[1]
        every = torch.arange(size, device=visual.device).expand_as(visual)
        real = torch.ones_like(visual) if self.known is None else self.known[:, self.past :]
        text = pack_places(~visual & real)
        # Stage 0 has a column for every token, padding included, as an unpruned model; later stages only for
        # the text and the visual tokens that are left.
        if number == 0:
            cols = every
        else:
            kept = torch.zeros(len(visual), size + 1, dtype=torch.bool, device=visual.device)
            kept.scatter_(1, vis.masked_fill(vis < 0, size), True)
            cols = pack_places((~visual & real) | kept[:, :size])
        new = torch.where(cols < 0, cols, cols + self.past)
        orig, marks = self.columns.extend(number, new, pick(visual, cols) & (cols >= 0))
        seen = orig >= 0
        if self.known is not None:
            seen = seen & pick(self.known, orig)
        plain = self.past == 0 and self.allowed is None and bool(seen.all())
        return TokenStage(text, vis, cols, orig, marks, seen, self.past, self.allowed, self.layout, plain)


def read_mask(mask: Tensor | None, past: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Convert an attention mask to a padding mask (B, past + S) or a mask of all pairs (B, S, past + S)."""
    if mask is None:
        return None, None
    if type(mask) is dict:
        raise ValueError(
            "a pruned model makes its own masks; pass `attention_mask` as (B, S) or (B, 1, S, S)"
        )
    if mask.shape[-1] != past + length:
        raise ValueError(
            f"the attention mask has {mask.shape[-1]} columns, but the cache holds {past} tokens and "
            f"{length} are new; pass the mask of the whole sequence, and only tokens not in the cache"
        )
    flags = mask if mask.dtype == torch.bool else (mask != 0 if mask.dim() == 2 else mask == 0)
    return (flags, None) if mask.dim() == 2 else (None, flags[:, 0])
