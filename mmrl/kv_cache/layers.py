"""The cache of one decoder layer: prompts stored once for all their rows, and the tokens read after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from mmrl.kv_cache.attention import attend_merged, causal_mask
from mmrl.kv_cache.blocks import Block, ExactBlock, spread
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.quantized_attention import attend_parts

ROOM = 16  # tokens; the buffers of a tail grow by multiples of it


class Tail(Protocol):
    """Tokens that rows read after their prompt: `keys` and `values` list parts with one row per batch row."""

    length: int  # slots up to and including the newest token
    nbytes: int

    def append(self, keys: Tensor, values: Tensor) -> None: ...  # (N, h, t, D) each
    def keys(self) -> list[Part]: ...
    def values(self) -> list[Part]: ...
    def select(self, rows: Tensor) -> None: ...
    def crop(self, length: int) -> None: ...  # keep the tokens before this slot


Stored = tuple[list[Part], list[Part], Tail]  # shared parts of keys and of values, and the tail after them


class GrowingTail:
    """Exact keys and values of the tokens that rows read after their prompt, from slot `start` on."""

    def __init__(self, start: int) -> None:
        self.start = self.length = start
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, unused room included."""
        return sum(x.numel() * x.element_size() for x in self._buffers or ())

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens (N, h, t, D).

        With gradients enabled the tensors are concatenated, because writing into a buffer would change
        tensors that the backward pass needs. Without, they go into buffers that grow by a quarter, so that
        older tokens are rarely copied.
        """
        fresh, used = (keys, values), self.length - self.start
        end = used + keys.shape[2]
        self.length += keys.shape[2]
        if torch.is_grad_enabled():
            older = tuple(x.narrow(2, 0, used) for x in self._buffers) if used else ()
            self._buffers = tuple(torch.cat(x, 2) for x in zip(older, fresh, strict=True)) if used else fresh
            return
        if self._buffers is None or end > self._buffers[0].shape[2]:
            room = -(-max(end, used + used // 4) // ROOM) * ROOM
            grown = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in fresh)
            if used:
                for new, old in zip(grown, self._buffers, strict=True):
                    new.narrow(2, 0, used).copy_(old.narrow(2, 0, used))
            self._buffers = grown
        for buffer, x in zip(self._buffers, fresh, strict=True):
            buffer.narrow(2, used, end - used).copy_(x)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values, (N, h, T, D) each."""
        return tuple(x.narrow(2, 0, self.length - self.start) for x in self._buffers)

    def keys(self) -> list[Part]:
        """List the keys as one part; none before the first token."""
        return self._part(0)

    def values(self) -> list[Part]:
        """List the values as one part; none before the first token."""
        return self._part(1)

    def _part(self, side: int) -> list[Part]:
        if self._buffers is None:
            return []
        x = self._buffers[side].narrow(2, 0, self.length - self.start)
        slots = _slot_range(self.start, self.length, x.device)
        return [Part(ExactBlock(x), slots, shared=False, name="tail")]

    def select(self, rows: Tensor) -> None:
        """Keep rows, in this order."""
        if self._buffers is not None:
            self._buffers = tuple(x[rows] for x in self._buffers)

    def crop(self, length: int) -> None:
        """Drop the tokens from this slot on."""
        self.start, self.length = min(self.start, length), min(self.length, length)


@lru_cache(maxsize=4)
def _slot_range(start: int, end: int, device: torch.device) -> Tensor:
    """Number slots (1, n); all layers ask for the same range in a step."""
    return torch.arange(start, end, device=device)[None]


class Recipe:
    """Base class of cache formats: how the keys and values of a prompt are stored."""

    needs_queries = False  # whether `score` must see the queries of a prompt before it is stored
    calibrates = False  # whether `calibrate` changes the scores of visual tokens before the softmax

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Store prompts (P, h, S, D)."""
        raise NotImplementedError

    def score(self, layer: QuantizedLayer, query: Tensor, scaling: float) -> None:
        """Look at the queries (P, H, S, D) of `layer.pending`; store it once all layers are known."""
        raise NotImplementedError

    def calibrate(self, scores: Tensor, valid: Tensor) -> Tensor:
        """Change the scores of visual tokens (..., n), of which `valid` are real."""
        return scores


class SharedPrefixLayer:
    """Exact keys and values of prompts (P, h, S, D), stored once for all their rows; gradients flow.

    `window` is that of a sliding-window layer, whose prompts store their last tokens only; 0 for full
    attention.
    """

    pending = None

    def __init__(self, layout: PromptLayout, keys: Tensor, values: Tensor, window: int) -> None:
        if torch.is_autocast_enabled(keys.device.type):
            # As attention is computed under autocast; otherwise the types of queries and keys may differ.
            dtype = torch.get_autocast_dtype(keys.device.type)
            keys, values = (x.to(dtype) if x.dtype != torch.float64 else x for x in (keys, values))
        self.layout, self.keys, self.values, self.window = layout, keys, values, window
        self.tail = GrowingTail(layout.length)

    @property
    def length(self) -> int:
        """Slots of the prompt and of what rows read since."""
        return self.tail.length

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values)) + self.tail.nbytes

    def slot_bytes(self) -> dict[int, int]:
        """No slots are stored: tokens are in the model's order."""
        return {}

    def update(self, keys: Tensor, values: Tensor) -> tuple[SharedPrefixLayer, SharedPrefixLayer]:
        """Add tokens (N, h, t, D); the attention function reads the layer itself."""
        self.tail.append(keys.to(self.keys.dtype), values.to(self.values.dtype))
        return self, self

    def select(self, rows: Tensor, prompts: Tensor | None) -> None:
        """Keep rows, in this order; `prompts` are those still in use, None for all."""
        if prompts is not None:
            self.keys, self.values = self.keys[prompts], self.values[prompts]
        self.tail.select(rows)

    def crop(self, num: int) -> None:
        """Drop the last `num` tokens of every row."""
        if self.length - num < self.layout.length:
            raise ValueError(
                f"a shared prompt of {self.layout.length} tokens is not cropped, but {num} of {self.length} "
                "tokens are to be dropped; drop tokens of answers only"
            )
        self.tail.crop(self.length - num)

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from the newest tokens (N, H, t, D) to everything stored: (N, t, H, D).

        `mask` is not read: the layout knows the padding of the prompts, and tails have none.
        """
        num, length = query.shape[2], self.length - self.layout.length
        prefix = self.layout.prefix_mask(num, length, self.keys.shape[2], self.window, self.keys)
        narrow = 0 < self.window < length
        own = causal_mask(num, length, self.keys, self.window) if narrow else None
        pairs = (self.keys, self.values), self.tail.tensors()
        out = attend_merged(query.to(self.keys.dtype), *pairs, self.layout.groups, scaling, prefix, own)
        return out.transpose(1, 2)


class QuantizedLayer:
    """Keys and values of prompts and rows in the format of a recipe, without gradients.

    With `fused` the attention function reads the layer itself; without, dense tensors are made in each step.
    """

    def __init__(self, recipe: Recipe, layout: PromptLayout, heads: int, size: int, *, fused: bool) -> None:
        self.recipe, self.layout, self.fused = recipe, layout, fused
        self.heads, self.size = heads, size  # key-value heads, channels of each
        self.shared: tuple[list[Part], list[Part]] | None = None
        self.tail: Tail | None = None
        self.pending: tuple[Tensor, Tensor] | None = None  # a prompt whose queries the recipe needs first
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored, except the slots of shared parts, which layers may share too."""
        parts = sum(part.block.nbytes for side in self.shared or () for part in side)
        pending = sum(x.numel() * x.element_size() for x in self.pending or ())
        return parts + pending + (self.tail.nbytes if self.tail else 0)

    def slot_bytes(self) -> dict[int, int]:
        """Bytes of the slots of shared parts, by address."""
        parts = [part for side in self.shared or () for part in side]
        return {part.slots.data_ptr(): part.slots.numel() * part.slots.element_size() for part in parts}

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor | QuantizedLayer, Tensor | QuantizedLayer]:
        """Add keys and values (N, h, t, D); return what attention reads: tensors, or the layer itself."""
        self._check(keys)
        if self.length:
            self.tail.append(keys, values)
            self.length += keys.shape[2]
            return (self, self) if self.fused else self.dense()
        if self.layout.length:
            repeats = len(keys) // len(self.layout.real)
        else:
            repeats = self.layout.begin(len(keys), keys.shape[2], keys.device)
        self.length = keys.shape[2]
        once = keys[::repeats], values[::repeats]
        if self.recipe.needs_queries:
            self.pending = once
            return self, self
        self.store(*once)
        return keys, values

    def _check(self, keys: Tensor) -> None:
        if keys.shape[1] != self.heads or keys.shape[3] != self.size:
            raise ValueError(
                f"this cache was made for {self.heads} key-value heads of size {self.size}, but the model "
                f"gives {keys.shape[1]} of size {keys.shape[3]}; make the cache from this model's config"
            )
        if keys.requires_grad and torch.is_grad_enabled():
            raise ValueError("no gradient flows through codes; use this cache under torch.no_grad()")

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Store prompts (P, h, S, D) by the recipe."""
        *shared, self.tail = self.recipe.store(keys, values, self.layout)
        self.shared, self.pending = tuple(shared), None

    def parts(self) -> tuple[list[Part], list[Part]]:
        """List the parts of all keys, and of all values."""
        keys, values = self.shared
        return [*keys, *self.tail.keys()], [*values, *self.tail.values()]

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, (N, h, length, D) each, in the model's order."""
        groups = self.layout.groups
        return tuple(
            sum(spread(part.dense(groups), part.row_slots(groups), self.length) for part in side)
            for side in self.parts()
        )

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from (N, H, t, D) queries to everything stored: (N, t, H, D)."""
        calibrate = self.recipe.calibrate if self.recipe.calibrates else None
        sizes = self.length, self.heads
        return attend_parts(query, self.parts(), self.layout, mask, scaling, *sizes, calibrate)

    def select(self, rows: Tensor, prompts: Tensor | None) -> None:
        """Keep rows, in this order; `prompts` are those still in use, None for all."""
        if self.shared is None:
            return
        if prompts is not None:
            self._move(lambda slots: slots[prompts], lambda block: block.select(prompts))
        self.tail.select(rows)

    def crop(self, num: int) -> None:
        """Drop the last `num` slots."""
        if not num or self.shared is None:
            return
        self.length = max(0, self.length - num)
        if self.length < self.layout.length:
            self._move(lambda slots: slots.masked_fill(slots >= self.length, -1), lambda block: block)
        self.tail.crop(self.length)

    def _move(self, slots: Callable[[Tensor], Tensor], block: Callable[[Block], Block]) -> None:
        """Change all shared parts; keys and values that share a slots tensor go on sharing one."""
        moved = {id(part.slots): slots(part.slots) for side in self.shared for part in side}
        self.shared = tuple(
            [replace(part, block=block(part.block), slots=moved[id(part.slots)]) for part in side]
            for side in self.shared
        )
