"""Cache layers: prompts stored once for all rows that answer them, and the tokens that rows add."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from mmrl.kv_cache.attention import attend_merged, attend_padded, causal_mask
from mmrl.kv_cache.blocks import Block, ExactBlock, collect, per_head, spread
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.quantization import Side
from mmrl.kv_cache.row_groups import RowGroups
from mmrl.kv_cache.tails import GrowingTail, ResidualWindow

Tail = GrowingTail | ResidualWindow
Stored = tuple[list[Part], list[Part], Tail]  # shared parts of keys and of values, and the tail after them


class Recipe:
    """Base class of cache formats, which store the keys and values of prompts."""

    needs_queries = False  # whether `score` must see the queries of a prompt before it is stored

    def for_layer(self, layer: int) -> Recipe:
        """Return the recipe of a layer number; by default all layers share this one."""
        return self

    def slots(self, visual: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
        """Choose the slots to store, by name, once for all layers; all tensors are on the CPU.

        `visual` and `real` are masks (P, S), `size` is the number of channels of a head.
        """
        return {}

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Store the keys and values of prompts (P, h, S, D); `layout.slots` has the result of `slots`."""
        raise NotImplementedError

    def score(self, layer: QuantizedLayer, query: Tensor, scaling: float) -> None:
        """Score the prompt in `layer.pending` by its queries (P, H, S, D); store it after the last layer."""
        raise NotImplementedError

    def calibrate(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Change the attention scores (R, h, Q, n) of visual tokens, at these slots, before the softmax."""
        return scores


@dataclass(frozen=True, kw_only=True)
class SplitRecipe(Recipe):
    """Base class of formats that quantise some tokens of a prompt and keep the others exact.

    `slots` returns "exact" (P, n) and "coded" (P, E, n), the quantised tokens in `E` groups.
    """

    nbits: float  # bits per number of the coded keys; 16: exact
    value_nbits: float  # bits per number of the coded values; 16: exact
    visual: bool = True  # whether all coded tokens are visual

    def encode(self, tokens: Tensor, slots: Tensor, side: Side) -> Block:
        """Quantise tokens (P, h, E * n, D) at slots (P, E, n)."""
        raise NotImplementedError

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Store prompts (P, h, S, D) as a part of exact and a part of coded tokens."""
        exact, coded = layout.slots["exact"], layout.slots["coded"]
        flat = coded.flatten(1)

        def split(x: Tensor, side: Side, nbits: float) -> list[Part]:
            parts = [Part(ExactBlock(collect(x, exact)), exact, name="exact")]
            if flat.shape[1]:
                tokens = collect(x, flat)
                block = ExactBlock(tokens) if nbits == 16 else self.encode(tokens, coded, side)
                parts.append(Part(block, flat, visual=self.visual, name="coded"))
            return parts

        keys, values = split(keys, "keys", self.nbits), split(values, "values", self.value_nbits)
        return keys, values, GrowingTail(layout.length)


class CacheLayer:
    """The interface that transformers requires of a cache layer; `length` counts its slots."""

    is_sliding, is_croppable = False, False
    length: int
    layout: PromptLayout
    pending: tuple[Tensor, Tensor] | None = None  # keys and values of a prompt that is not stored yet

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # memory is allocated with the first tokens

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0  # the number of keys, and the slot of the first one

    def get_max_length(self) -> int:
        return -1  # none

    def shared_parts(self) -> list[Part]:
        """List the parts of prompts, of keys and then of values; none in an exact layer."""
        return []


class SharedPrefixLayer(CacheLayer):
    """Exact keys and values of prompts (P, h, S, D), stored once for all rows; supports gradients.

    A layer with a sliding `window` stores the last tokens of prompts only; 0: full attention.
    """

    def __init__(self, layout: PromptLayout, keys: Tensor, values: Tensor, window: int) -> None:
        if torch.is_autocast_enabled(keys.device.type):
            # Attention runs in the precision of autocast, so that queries and keys have the same type.
            dtype = torch.get_autocast_dtype(keys.device.type)
            keys, values = (x.to(dtype) if x.dtype != torch.float64 else x for x in (keys, values))
        self.layout, self.keys, self.values, self.window = layout, keys, values, window
        self.tail = GrowingTail(layout.length)

    @property
    def length(self) -> int:
        """Slots of the prompt and of the tokens after it."""
        return self.tail.length

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values, in bytes."""
        return self.keys.nbytes + self.values.nbytes + self.tail.nbytes

    def update(self, keys: Tensor, values: Tensor) -> tuple[SharedPrefixLayer, SharedPrefixLayer]:
        """Append keys and values (N, h, t, D); return the layer, which the attention function reads."""
        self.tail.append(keys.to(self.keys.dtype), values.to(self.values.dtype))
        return self, self

    def select(self, rows: Tensor, prompts: Tensor | None) -> None:
        """Index rows, and prompts unless None."""
        if prompts is not None:
            self.keys, self.values = self.keys[prompts], self.values[prompts]
        self.tail.select(rows)

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from queries of the newest tokens (N, H, t, D) to all stored tokens: (N, t, H, D).

        `mask` is ignored, because the layout knows the padding.
        """
        num, length, stored = query.shape[2], self.length - self.layout.length, self.keys.shape[2]
        query, pairs = query.to(self.keys.dtype), ((self.keys, self.values), self.tail.tensors())
        if self.layout.pad is not None:
            repeats = query.shape[1] // self.keys.shape[1]
            masks = self.layout.padded_masks(num, length, stored, self.window, repeats, self.keys)
            out = attend_padded(query, *pairs, self.layout.groups, scaling, *masks, window=self.window)
            return out.transpose(1, 2)
        prefix = self.layout.prefix_mask(num, length, stored, self.window, self.keys)
        narrow = 0 < self.window < length  # otherwise the window covers all own tokens
        own = causal_mask(num, length, self.keys, self.window) if narrow else None
        return attend_merged(query, *pairs, self.layout.groups, scaling, prefix, own).transpose(1, 2)


class QuantizedLayer(CacheLayer):
    """Keys and values of prompts and rows in the format of a recipe, without gradients.

    With `fused` attention multiplies the codes; without, every step dequantises all tokens.
    """

    def __init__(self, recipe: Recipe, layout: PromptLayout, heads: int, size: int, *, fused: bool) -> None:
        self.recipe, self.layout, self.fused = recipe, layout, fused
        self.heads, self.size = heads, size  # key-value heads, channels of each
        self.shared: tuple[list[Part], list[Part]] | None = None
        self.tail: Tail | None = None
        self.length = 0

    def shared_parts(self) -> list[Part]:
        """List the parts of prompts, of keys and then of values."""
        return [part for side in self.shared or () for part in side]

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without the slots of shared parts, which layers may have in common."""
        blocks, pending = (part.block for part in self.shared_parts()), self.pending or ()
        return sum(x.nbytes for x in (*blocks, *pending, *([self.tail] if self.tail else [])))

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor | QuantizedLayer, Tensor | QuantizedLayer]:
        """Append keys and values (N, h, t, D); return the inputs of attention: tensors, or the layer."""
        if keys.shape[1] != self.heads or keys.shape[3] != self.size:
            raise ValueError(
                f"this cache was made for {self.heads} key-value heads of size {self.size}, but the model "
                f"gives {keys.shape[1]} of size {keys.shape[3]}; make the cache from this model's config"
            )
        if keys.requires_grad and torch.is_grad_enabled():
            raise ValueError("no gradient flows through codes; use this cache under torch.no_grad()")
        if self.length:
            self.tail.append(keys, values)
            self.length += keys.shape[2]
            return (self, self) if self.fused else self.dense()
        if self.layout.length:
            repeats = len(keys) // len(self.layout.real)  # not the first layer, which began the layout
        else:
            repeats = self.layout.begin(len(keys), keys.shape[2], keys.device)
        self.length = keys.shape[2]
        once = keys[::repeats], values[::repeats]  # rows of one prompt are side by side
        if self.recipe.needs_queries:
            self.pending = once
            return self, self
        self.store(*once)
        return keys, values

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of prompts (P, h, S, D) in the format of the recipe."""
        layout = self.layout
        if not layout.slots:
            chosen = self.recipe.slots(layout.visual.cpu(), layout.real.cpu(), self.size)
            layout.slots = {name: slots.to(keys.device) for name, slots in chosen.items()}
        *shared, self.tail = self.recipe.store(keys, values, layout)
        self.shared, self.pending = tuple(shared), None

    def parts(self) -> tuple[list[Part], list[Part]]:
        """List the parts of all keys, and of all values."""
        return tuple([*shared, *own] for shared, own in zip(self.shared, self.tail.parts(), strict=True))

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, (N, h, length, D) each, in the order of the model's mask."""
        groups = self.layout.groups
        # A slot is in at most one part and 0 in the others, so the sum joins them.
        return tuple(
            sum(spread(part.dense(groups), part.row_slots(groups), self.length) for part in side)
            for side in self.parts()
        )

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from queries (N, H, t, D) to all stored tokens: (N, t, H, D).

        The scores of all parts are concatenated for one softmax. Rows of one prompt are folded into queries
        of one product until the scores are weights, so that the prompt is read once for all of them. `mask`
        is the model's mask over `length` slots.
        """
        rows, heads, num, size = query.shape
        groups, (keys, values) = self.layout.groups, self.parts()
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        scaled = (query.to(exact) * scaling).reshape(rows, self.heads, -1, size)  # (N, h, H / h * t, D)
        folded, pieces = groups.fold(scaled), []
        for part in keys:
            score = part.block.dots(folded if part.shared else scaled)
            if part.visual:
                score = self.recipe.calibrate(score, part.slots)
            pieces.append(score if part.shared else groups.fold(score))
        scores = torch.cat(pieces, -1)  # (P, h, g * Q, n)
        hidden = self.layout.hidden(keys, mask, num, self.length, (self.heads, heads // self.heads))
        if hidden is not None:
            scores.masked_fill_(hidden, torch.finfo(exact).min)  # finite: no NaN in rows of padding
        weights = split_weights(groups, keys, values, scores.softmax(-1), self.length)
        # Add the outputs of shared parts before unfolding them to rows.
        sums: dict[bool, list[Tensor]] = {}
        for part, weight in zip(values, weights, strict=True):
            sums.setdefault(part.shared, []).append(part.block.mix(weight))
        out = [
            groups.unfold(reduce(torch.add, x)) if shared else reduce(torch.add, x)
            for shared, x in sums.items()
        ]
        return reduce(torch.add, out).reshape(rows, heads, num, size).transpose(1, 2).to(query.dtype)

    def select(self, rows: Tensor, prompts: Tensor | None) -> None:
        if self.shared is None:
            return
        if prompts is not None:
            # Keys and values may share one tensor of slots, and continue to do so.
            slots = {id(part.slots): part.slots[prompts] for part in self.shared_parts()}
            self.shared = tuple(
                [replace(p, block=p.block.select(prompts), slots=slots[id(p.slots)]) for p in side]
                for side in self.shared
            )
        self.tail.select(rows)


def split_weights(
    groups: RowGroups, keys: list[Part], values: list[Part], weights: Tensor, length: int
) -> list[Tensor]:
    """Split the attention weights of all keys (P, h, g * Q, n) by the parts of the values.

    The weights of a shared part are (P, h, g * Q, n), of any other part (N, h, Q, n).
    """
    if len(keys) == len(values) and all(
        k.slots is v.slots or k.name == v.name != "" for k, v in zip(keys, values, strict=True)
    ):
        split = weights.split_with_sizes([part.slots.shape[-1] for part in keys], -1)
        return [x if part.shared else groups.unfold(x) for part, x in zip(values, split, strict=True)]
    # Values are stored in another order than keys: scatter the weights to slots, then gather them.
    weights = groups.unfold(weights)
    slots = [per_head(part.row_slots(groups)).expand(-1, weights.shape[1], -1) for part in keys]
    index = torch.cat(slots, -1)[:, :, None].expand(weights.shape).clamp(min=0)
    # Empty places have weight 0, so adding them to slot 0 changes nothing.
    by_slot = weights.new_zeros(*weights.shape[:-1], length).scatter_add_(-1, index, weights)
    split = []
    for part in values:
        slots = per_head(part.row_slots(groups))[:, :, None]
        weight = by_slot.gather(-1, slots.clamp(min=0).expand(*weights.shape[:3], -1)) * (slots >= 0)
        split.append(groups.fold(weight) if part.shared else weight)
    return split
