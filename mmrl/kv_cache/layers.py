"""Cache layers: prompts stored once for all of their rows, and the tokens that rows append."""

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
Stored = tuple[list[Part], list[Part], Tail]  # key parts and value parts of prompts; tail of later tokens


class Recipe:
    """Base class of cache formats, which define how keys and values of prompts are stored."""

    needs_queries = False  # whether `score` needs a prompt's queries before the prompt is stored

    def for_layer(self, layer: int) -> Recipe:
        """Return the recipe for a layer index; by default all layers share this recipe."""
        return self

    def slots(self, visual: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
        """Choose the token slots (positions) to store, once for all layers, as named CPU index tensors.

        `visual` and `real` (not padding) are masks (prompts, tokens); `size` is the number of channels per
        head.
        """
        return {}

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Store the keys and values of prompts; `layout.slots` contains the result of `Recipe.slots`."""
        raise NotImplementedError

    def score(self, layer: QuantizedLayer, query: Tensor, scaling: float) -> None:
        """Score a layer's pending prompt tokens by prompt queries; after the last layer, store all layers."""
        raise NotImplementedError

    def calibrate(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Change the attention scores of visual tokens at `slots` before the softmax; default: no change."""
        return scores


@dataclass(frozen=True, kw_only=True)
class SplitRecipe(Recipe):
    """Base class of formats that quantise some tokens of a prompt and store the others exactly.

    `slots` returns indices "exact" (prompts, n) and "coded" (prompts, groups, n), the tokens to quantise.
    """

    nbits: float  # bits per element of the quantised keys; 16: exact
    value_nbits: float  # bits per element of the quantised values; 16: exact
    visual: bool = True  # whether all quantised tokens are visual

    def encode(self, tokens: Tensor, slots: Tensor, side: Side) -> Block:
        """Quantise tokens (prompts, heads, groups * n, channels) at the slots (prompts, groups, n)."""
        raise NotImplementedError

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Store the keys and values of prompts in two parts: exact tokens and quantised tokens."""
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
    """The interface that transformers requires of a cache layer; `length` is its number of slots."""

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
        return self.length + query_length, 0  # number of keys, and slot of the first key

    def get_max_length(self) -> int:
        return -1  # no maximum

    def shared_parts(self) -> list[Part]:
        """List the stored parts of prompts, keys before values; empty for an exact layer."""
        return []


class SharedPrefixLayer(CacheLayer):
    """Exact keys and values of prompts, stored once for all rows that share them; supports gradients.

    A layer with a sliding `window` stores only the last tokens of prompts; 0: full attention.
    """

    def __init__(self, layout: PromptLayout, keys: Tensor, values: Tensor, window: int) -> None:
        if torch.is_autocast_enabled(keys.device.type):
            # Store keys in the dtype of autocast, so that queries and keys have the same dtype.
            dtype = torch.get_autocast_dtype(keys.device.type)
            keys, values = (x.to(dtype) if x.dtype != torch.float64 else x for x in (keys, values))
        self.layout, self.keys, self.values, self.window = layout, keys, values, window
        self.tail = GrowingTail(layout.length)

    @property
    def length(self) -> int:
        """Number of slots (token positions) of the prompt and of the tokens after the prompt."""
        return self.tail.length

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values, in bytes."""
        return self.keys.nbytes + self.values.nbytes + self.tail.nbytes

    def update(self, keys: Tensor, values: Tensor) -> tuple[SharedPrefixLayer, SharedPrefixLayer]:
        """Append keys and values of new tokens; return this layer, which the attention function reads."""
        self.tail.append(keys.to(self.keys.dtype), values.to(self.values.dtype))
        return self, self

    def select(self, rows: Tensor, prompts: Tensor | None) -> None:
        """Select rows by index, and also prompts by index unless `prompts` is None."""
        if prompts is not None:
            self.keys, self.values = self.keys[prompts], self.values[prompts]
        self.tail.select(rows)

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from the newest tokens (rows, heads, tokens, channels) to all stored tokens.

        Returns (rows, tokens, heads, channels). `mask` is ignored, because the layout knows the padding.
        """
        num, length, stored = query.shape[2], self.length - self.layout.length, self.keys.shape[2]
        query, pairs = query.to(self.keys.dtype), ((self.keys, self.values), self.tail.tensors())
        if self.layout.pad is not None:
            repeats = query.shape[1] // self.keys.shape[1]
            masks = self.layout.padded_masks(num, length, stored, self.window, repeats, self.keys)
            out = attend_padded(query, *pairs, self.layout.groups, scaling, *masks, window=self.window)
            return out.transpose(1, 2)
        prefix = self.layout.prefix_mask(num, length, stored, self.window, self.keys)
        narrow = 0 < self.window < length  # else the window covers all own tokens
        own = causal_mask(num, length, self.keys, self.window) if narrow else None
        return attend_merged(query, *pairs, self.layout.groups, scaling, prefix, own).transpose(1, 2)


class QuantizedLayer(CacheLayer):
    """Cache layer that stores prompts and later tokens in the format of a recipe, without gradients.

    With `fused`, attention is computed on the codes; otherwise every step dequantises all tokens.
    """

    def __init__(self, recipe: Recipe, layout: PromptLayout, heads: int, size: int, *, fused: bool) -> None:
        self.recipe, self.layout, self.fused = recipe, layout, fused
        self.heads, self.size = heads, size  # number of key-value heads, channels per head
        self.shared: tuple[list[Part], list[Part]] | None = None
        self.tail: Tail | None = None
        self.length = 0

    def shared_parts(self) -> list[Part]:
        """List the stored parts of prompts, keys before values."""
        return [part for side in self.shared or () for part in side]

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without the slots of shared parts, since several layers may use the same slots."""
        blocks, pending = (part.block for part in self.shared_parts()), self.pending or ()
        return sum(x.nbytes for x in (*blocks, *pending, *([self.tail] if self.tail else [])))

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor | QuantizedLayer, Tensor | QuantizedLayer]:
        """Append keys and values of new tokens; return the inputs of attention: tensors, or this layer."""
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
            repeats = len(keys) // len(self.layout.real)  # the first layer has set up the layout
        else:
            repeats = self.layout.begin(len(keys), keys.shape[2], keys.device)
        self.length = keys.shape[2]
        once = keys[::repeats], values[::repeats]  # rows of the same prompt are adjacent
        if self.recipe.needs_queries:
            self.pending = once
            return self, self
        self.store(*once)
        return keys, values

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of prompts in the format of the recipe."""
        layout = self.layout
        if not layout.slots:
            chosen = self.recipe.slots(layout.visual.cpu(), layout.real.cpu(), self.size)
            layout.slots = {name: slots.to(keys.device) for name, slots in chosen.items()}
        *shared, self.tail = self.recipe.store(keys, values, layout)
        self.shared, self.pending = tuple(shared), None

    def parts(self) -> tuple[list[Part], list[Part]]:
        """Return the list of key parts and the list of value parts, of prompts and later tokens."""
        return tuple([*shared, *own] for shared, own in zip(self.shared, self.tail.parts(), strict=True))

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return all keys and all values, dequantised, per row and in the order of the model's mask."""
        groups = self.layout.groups
        # Sum the parts: each slot is filled in at most one of them and 0 in the others.
        return tuple(
            sum(spread(part.dense(groups), part.row_slots(groups), self.length) for part in side)
            for side in self.parts()
        )

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from queries (rows, heads, tokens, channels) to all stored tokens.

        Returns (rows, tokens, heads, channels). The scores of all parts are concatenated for one softmax. The
        queries of all rows of a prompt are folded into one matrix product, so the prompt is read once. `mask`
        is the attention mask of the model.
        """
        rows, heads, num, size = query.shape
        groups, (keys, values) = self.layout.groups, self.parts()
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        scaled = (query.to(exact) * scaling).reshape(rows, self.heads, -1, size)
        folded, pieces = groups.fold(scaled), []
        for part in keys:
            score = part.block.dots(folded if part.shared else scaled)
            if part.visual:
                score = self.recipe.calibrate(score, part.slots)
            pieces.append(score if part.shared else groups.fold(score))
        scores = torch.cat(pieces, -1)  # (prompts, key heads, folded queries, tokens)
        hidden = self.layout.hidden(keys, mask, num, self.length, (self.heads, heads // self.heads))
        if hidden is not None:
            scores.masked_fill_(hidden, torch.finfo(exact).min)  # finite, so that rows of padding give no NaN
        weights = split_weights(groups, keys, values, scores.softmax(-1), self.length)
        # Add the outputs of shared parts before unfolding them to one output per row.
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
            # Select each slot tensor only once, so that keys and values still share it.
            slots = {id(part.slots): part.slots[prompts] for part in self.shared_parts()}
            self.shared = tuple(
                [replace(p, block=p.block.select(prompts), slots=slots[id(p.slots)]) for p in side]
                for side in self.shared
            )
        self.tail.select(rows)


def split_weights(
    groups: RowGroups, keys: list[Part], values: list[Part], weights: Tensor, length: int
) -> list[Tensor]:
    """Split the attention weights over all keys into one tensor per part of the values.

    Weights of a shared part stay folded (see `RowGroups.fold`); others are (rows, heads, queries, tokens).
    """
    if len(keys) == len(values) and all(
        k.slots is v.slots or k.name == v.name != "" for k, v in zip(keys, values, strict=True)
    ):
        split = weights.split_with_sizes([part.slots.shape[-1] for part in keys], -1)
        return [x if part.shared else groups.unfold(x) for part, x in zip(values, split, strict=True)]
    # Scatter the weights to slots, then gather them, as values are stored in another order than keys.
    weights = groups.unfold(weights)
    slots = [per_head(part.row_slots(groups)).expand(-1, weights.shape[1], -1) for part in keys]
    index = torch.cat(slots, -1)[:, :, None].expand(weights.shape).clamp(min=0)
    # Empty entries have weight 0, so adding them to slot 0 changes nothing.
    by_slot = weights.new_zeros(*weights.shape[:-1], length).scatter_add_(-1, index, weights)
    split = []
    for part in values:
        slots = per_head(part.row_slots(groups))[:, :, None]
        weight = by_slot.gather(-1, slots.clamp(min=0).expand(*weights.shape[:3], -1)) * (slots >= 0)
        split.append(groups.fold(weight) if part.shared else weight)
    return split
