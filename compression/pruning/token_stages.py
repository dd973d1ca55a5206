"""Stages: the layers between two token reductions, which have the same queries (rows) and keys (columns).

All layers of a stage have the same visual tokens, and thus the same columns in their cache layers. The
position and kind of every column are stored in extra layers at the end of the same cache. So operations on
the cache, such as beam search, cropping and row selection, apply to them, too.
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

Rotary = tuple[Tensor, Tensor]  # cosines and sines of rows, each (B, n, D)


@dataclass(frozen=True, eq=False)
class TokenStage:
    """Queries (rows) and keys (columns) of a stage: `S` tokens in this call, `C` columns with the past.

    `text` (B, n_t) and `vis` (B, n_v) are indices of text and visual tokens of this call. `cols` (B, n_c) are
    the indices of tokens that become columns, in sequence order. All three are padded with -1 on the left.
    `orig` (B, C) is the position of each column in the whole sequence. `visual` (B, C) marks visual columns,
    and `seen` (B, C) columns that are not padding.
    """

    call: ForwardCall
    text: Tensor
    vis: Tensor
    cols: Tensor
    orig: Tensor
    visual: Tensor
    seen: Tensor
    text_rotary: Rotary
    vis_rotary: Rotary
    plain: bool  # no padding and no past, so that the mask is simply causal
    memo: dict[Any, Any] = field(default_factory=dict)

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """Return the value of `make()`, computed once for all layers of the stage and cached under `name`."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]

    def bias(self, name: Any, make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """Convert a mask to an additive bias (0 or -inf), once for all layers of the stage."""

        def added() -> Tensor:
            mask = make()
            nothing = torch.zeros((), dtype=dtype, device=mask.device)
            return torch.where(mask, nothing, float("-inf"))

        return self.once((name, dtype), added)

    def mask(self, rows: Tensor, *, text_only: bool = False) -> Tensor:
        """Compute the mask (B, 1, n, C) of the columns to which the tokens `rows` (B, n) of this call attend.

        A fully masked query (padding) attends to all columns, so that its softmax is defined.
        """
        at = rows.clamp(min=0) + self.call.past
        see = self.seen[:, None] & (self.orig[:, None] <= at[:, :, None])
        if self.call.allowed is not None:
            see = see & pick(pick(self.call.allowed, rows), self.orig, dim=2)
        if text_only:
            see = see & ~self.visual[:, None]
        return (see | ~see.any(-1, keepdim=True))[:, None]

    @cached_property
    def text_mask(self) -> Tensor | None:
        """Attention mask of the text tokens over the keys (columns); None if they attend to all keys."""
        mask = self.mask(self.text)
        return None if self.text.shape[1] == 1 and bool(mask.all()) else mask

    @cached_property
    def is_token(self) -> Tensor:
        """Mask (B, n_v) of the entries of `vis` that are tokens, not padding."""
        return self.vis >= 0

    @cached_property
    def any_visual(self) -> bool:
        """Whether at least one key (column) belongs to a visual token."""
        return bool(self.visual.any())

    @cached_property
    def all_text(self) -> bool:
        """Whether the tokens of this call that remain are exactly the text tokens, in order."""
        same_shape = self.vis.shape[1] == 0 and self.text.shape == self.cols.shape
        return same_shape and bool((self.text == self.cols).all())

    def inverse(self, index: Tensor) -> Tensor:
        """Invert `index` (B, n): return the position of each of S tokens in it, (B, S); 0 if absent."""
        size = self.call.layout.visual.shape[1]
        order = torch.arange(index.shape[1], device=index.device).expand_as(index)
        # The additional last entry receives the values of padding (-1).
        places = index.new_zeros(len(index), size + 1)
        places.scatter_(1, index.masked_fill(index < 0, size), order)
        return places[:, :size]

    @cached_property
    def text_at(self) -> Tensor:
        """Position (B, n_t) of every text token in the sequence of remaining tokens of this call."""
        return self.inverse(self.cols).gather(1, self.text.clamp(min=0))

    @cached_property
    def vis_at(self) -> Tensor:
        """Position (B, n_v) of every visual token in the sequence of remaining tokens of this call."""
        return self.inverse(self.cols).gather(1, self.vis.clamp(min=0))

    @cached_property
    def gather(self) -> Tensor:
        """Index of every remaining token in the concatenation of text and visual tokens: (B, n_c)."""
        return pick(self.inverse(torch.cat([self.text, self.vis], 1)), self.cols)

    @cached_property
    def runs(self) -> list[tuple[bool, slice, slice]] | None:
        """Runs of text or visual tokens, in sequence order: (is visual, slice of its tokens, of columns).

        None if the rows of the batch differ or have padding.
        """
        padded = torch.cat([self.text, self.vis, self.cols], 1).lt(0)
        if bool(padded.any()) or not self.cols.numel() or bool((self.gather != self.gather[0]).any()):
            return None
        # A run ends where the token index jumps, or where it changes from text (below n) to visual tokens.
        rows, n = self.gather[0].tolist(), self.text.shape[1]
        starts = [at for at, row in enumerate(rows) if not at or row != rows[at - 1] + 1 or row == n]
        runs = []
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            visual = rows[start] >= n
            first = rows[start] - n * visual
            runs.append((visual, slice(first, first + end - start), slice(start, end)))
        return runs

    def join(self, text: Tensor, vis: Tensor, heads: FeatureIndex, total: int) -> Tensor:
        """Merge text tokens (B, H, n_t, D) and visual tokens (B, h, n_v, D) in sequence order.

        `heads` are the heads, out of `total`, that the visual tokens have; other heads become zero.
        """
        batch, _, _, size = text.shape
        if self.runs is None:
            if heads is not None:
                spread = vis.new_zeros(batch, total, *vis.shape[2:])
                spread[:, heads] = vis
                vis = spread
            return pick(torch.cat([text, vis], 2), self.gather, 2)
        shape = (batch, total, self.cols.shape[1], size)
        out = text.new_empty(shape) if heads is None else text.new_zeros(shape)
        for visual, rows, columns in self.runs:
            if visual:
                out[:, slice(None) if heads is None else heads, columns] = vis[:, :, rows]
            else:
                out[:, :, columns] = text[:, :, rows]
        return out

    @cached_property
    def words(self) -> tuple[Tensor, Tensor]:
        """Columns (B, t) of text before the last visual token, padded with -1, and their mask (B, n_v, t)."""
        at = self.vis.clamp(min=0) + self.call.past
        last = at.masked_fill(self.vis < 0, -1).max(1).values
        columns = pack_places(~self.visual & self.seen & (self.orig < last[:, None]))
        orig = pick(self.orig, columns)
        before = orig[:, None] < at[:, :, None]
        if self.call.allowed is not None:
            before = before & pick(pick(self.call.allowed, self.vis), orig, dim=2)
        return columns, before & (columns >= 0)[:, None]


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """Inputs of one call of the language model, before any token reduction."""

    layout: TokenLayout
    cache: Any
    layers: int  # layers of the model; the cache's extra layers come after these
    past: int
    known: Tensor | None  # (B, past + S) mask of the tokens that are not padding, if known
    allowed: Tensor | None  # (B, S, past + S) mask of all pairs, if the caller passed one
    rotary: Rotary  # cosines and sines of all tokens, each (B, S, D)

    def stage(self, number: int, vis: Tensor | None = None) -> TokenStage:
        """Build stage `number` (0: the first) with visual tokens `vis` (B, n_v); None: all visual tokens."""
        from transformers.cache_utils import DynamicLayer

        visual = self.layout.visual
        size = visual.shape[1]
        real = torch.ones_like(visual) if self.known is None else self.known[:, self.past :]
        text = pack_places(~visual & real)
        # Stage 0 has a column for every token, including padding, as in an unpruned model. Later stages have
        # columns only for the text and the remaining visual tokens.
        if vis is None:
            vis = pack_places(visual & real)
            cols = torch.arange(size, device=visual.device).expand_as(visual)
        else:
            kept = torch.zeros(len(visual), size + 1, dtype=torch.bool, device=visual.device)
            kept.scatter_(1, vis.masked_fill(vis < 0, size), True)
            cols = pack_places((~visual & real) | kept[:, :size])
        new = torch.where(cols < 0, cols, cols + self.past)
        orig, marks = new, pick(visual, cols) & (cols >= 0)
        if self.cache is not None:
            while len(self.cache.layers) <= self.layers + number:
                self.cache.layers.append(DynamicLayer())
            record = self.cache.layers[self.layers + number]
            # The cache stores `orig` as keys, `marks` as values of one head and channel: (B, 1, C, 1).
            orig, marks = (
                x[:, 0, :, 0] for x in record.update(new[:, None, :, None], marks[:, None, :, None])
            )
            marks = marks.bool()
        seen = orig >= 0
        if self.known is not None:
            seen = seen & pick(self.known, orig)
        plain = self.past == 0 and self.allowed is None and bool(seen.all())
        rotary = [tuple(pick(x, rows) for x in self.rotary) for rows in (text, vis)]
        return TokenStage(self, text, vis, cols, orig, marks, seen, *rotary, plain)


def past_tokens(cache: Any, layers: int) -> int:
    """Return how many tokens a cache has read, which is the length of its first extra layer; 0 if empty."""
    filled = cache is not None and cache.get_seq_length() and len(cache.layers) > layers
    return cache.layers[layers].get_seq_length() if filled else 0


def read_mask(mask: Tensor | None, past: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Convert a mask to (padding mask (B, past + S), None) or (None, mask of all pairs (B, S, past + S))."""
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
