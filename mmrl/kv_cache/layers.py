"""The cache of one decoder layer: prompts stored once for all their rows, and the tokens read after them."""

from __future__ import annotations

from collections.abc import Callable
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
    """Base class of cache formats: how the keys and values of a prompt are stored."""

    needs_queries = False  # whether `score` must see the queries of a prompt before it is stored

    def for_layer(self, layer: int) -> Recipe:
        """Return the recipe of a layer; by default one serves all."""
        return self

    def slots(self, visual: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
        """Choose, once for all layers, the slots of what is stored; masks (P, S) and slots on the CPU."""
        return {}

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Store prompts (P, h, S, D); `layout.slots` are those of `slots`."""
        raise NotImplementedError

    def score(self, layer: QuantizedLayer, query: Tensor, scaling: float) -> None:
        """Look at the queries (P, H, S, D) of `layer.pending`; store it once all layers are known."""
        raise NotImplementedError

    def calibrate(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Change the scores (R, h, Q, n) of visual tokens before the softmax; `slots` are theirs."""
        return scores


@dataclass(frozen=True, kw_only=True)
class SplitRecipe(Recipe):
    """Base class of formats that encode some tokens of a prompt and keep the others exact.

    Their `slots` are those of "exact" (P, n) and of "coded" tokens (P, E, n), in `E` groups. The bits are
    those per number of keys and of values; 16 keep coded tokens exact as well.
    """

    nbits: float
    value_nbits: float
    visual: bool = True  # whether all coded tokens are visual

    def encode(self, tokens: Tensor, slots: Tensor, side: Side) -> Block:
        """Encode tokens (P, h, E * n, D) of slots (P, E, n)."""
        raise NotImplementedError

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Split prompts (P, h, S, D) into exact and coded tokens."""
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
    """What transformers ask of one layer of a cache; `length` counts the slots of its tokens."""

    is_sliding, is_croppable = False, True
    length: int
    layout: PromptLayout
    pending: tuple[Tensor, Tensor] | None = None  # a prompt whose queries the recipe needs first

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
        """List the parts of keys and values that have slots."""
        return []


class SharedPrefixLayer(CacheLayer):
    """Exact keys and values of prompts (P, h, S, D), stored once for all their rows; gradients flow.

    `window` is that of a sliding-window layer, whose prompts store their last tokens only; 0 for full
    attention.
    """

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
        return self.keys.nbytes + self.values.nbytes + self.tail.nbytes

    def update(self, keys: Tensor, values: Tensor) -> tuple[SharedPrefixLayer, SharedPrefixLayer]:
        """Add tokens (N, h, t, D); the attention function reads the layer itself."""
        self.tail.append(keys.to(self.keys.dtype), values.to(self.values.dtype))
        return self, self

    def select(self, rows: Tensor, prompts: Tensor | None) -> None:
        """Keep rows, in this order; `prompts` are those still in use, None for all."""
        if prompts is not None:
            self.keys, self.values = self.keys[prompts], self.values[prompts]
        self.tail.select(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every row, minus `tokens_to_remove` many."""
        length = self.length + tokens_to_remove  # which is negative, as transformers pass it
        if length < self.layout.length:
            raise ValueError(
                f"a shared prompt of {self.layout.length} tokens is not cropped, but {-tokens_to_remove} of "
                f"{self.length} tokens are to be dropped; drop tokens of answers only"
            )
        self.tail.crop(length)

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from the newest tokens (N, H, t, D) to everything stored: (N, t, H, D).

        `mask` is not read: the layout knows the padding of the prompts and of tails.
        """
        num, length, stored = query.shape[2], self.length - self.layout.length, self.keys.shape[2]
        query, pairs = query.to(self.keys.dtype), ((self.keys, self.values), self.tail.tensors())
        if self.layout.pad is not None:
            repeats = query.shape[1] // self.keys.shape[1]
            masks = self.layout.padded_masks(num, length, stored, self.window, repeats, self.keys)
            out = attend_padded(query, *pairs, self.layout.groups, scaling, *masks, window=self.window)
            return out.transpose(1, 2)
        prefix = self.layout.prefix_mask(num, length, stored, self.window, self.keys)
        narrow = 0 < self.window < length  # else no own token is out of reach
        own = causal_mask(num, length, self.keys, self.window) if narrow else None
        return attend_merged(query, *pairs, self.layout.groups, scaling, prefix, own).transpose(1, 2)


class QuantizedLayer(CacheLayer):
    """Keys and values of prompts and rows in the format of a recipe, without gradients.

    With `fused` the attention function reads the layer itself; without, dense tensors are made in each step.
    """

    def __init__(self, recipe: Recipe, layout: PromptLayout, heads: int, size: int, *, fused: bool) -> None:
        self.recipe, self.layout, self.fused = recipe, layout, fused
        self.heads, self.size = heads, size  # key-value heads, channels of each
        self.shared: tuple[list[Part], list[Part]] | None = None
        self.tail: Tail | None = None
        self.length = 0

    def shared_parts(self) -> list[Part]:
        """List the parts of prompts: those of keys, then those of values."""
        return [part for side in self.shared or () for part in side]

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored, except the slots of shared parts, which layers may share too."""
        tail = self.tail.nbytes if self.tail else 0
        return (
            sum(p.block.nbytes for p in self.shared_parts())
            + sum(x.nbytes for x in self.pending or ())
            + tail
        )

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor | QuantizedLayer, Tensor | QuantizedLayer]:
        """Add keys and values (N, h, t, D); return what attention reads: tensors, or the layer itself."""
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
            repeats = len(keys) // len(self.layout.real)  # a later layer: the layout began with the first one
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
        """Store prompts (P, h, S, D) by the recipe."""
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
        """Return all keys and values, (N, h, length, D) each, in the model's order."""
        groups = self.layout.groups
        # A slot is in one part at most and 0 in the others, so that the sum joins them.
        return tuple(
            sum(spread(part.dense(groups), part.row_slots(groups), self.length) for part in side)
            for side in self.parts()
        )

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend from (N, H, t, D) queries to everything stored: (N, t, H, D).

        The scores of all parts are concatenated for one softmax. Rows of one prompt are queries of one
        product, so that the prompt is read once for all of them, and they stay folded until scores are
        weights. `mask` is the model's, over `length` slots.
        """
        rows, heads, num, size = query.shape
        groups, (keys, values) = self.layout.groups, self.parts()
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        asked = (query.to(exact) * scaling).reshape(rows, self.heads, -1, size)  # (N, h, H / h * t, D)
        folded, pieces = groups.fold(asked), []
        for part in keys:
            score = part.block.dots(folded if part.shared else asked)
            if part.visual:
                score = self.recipe.calibrate(score, part.slots)
            pieces.append(score if part.shared else groups.fold(score))
        scores = torch.cat(pieces, -1)  # (P, h, g * Q, n)
        hidden = self.layout.hidden(keys, mask, num, self.length, (self.heads, heads // self.heads))
        if hidden is not None:
            scores.masked_fill_(hidden, torch.finfo(exact).min)  # finite, so that rows of padding give no NaN
        weights = split_weights(groups, keys, values, scores.softmax(-1), self.length)
        # Sums over shared parts are added before they are unfolded to rows.
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
            self.move(lambda slots: slots[prompts], lambda block: block.select(prompts))
        self.tail.select(rows)

    def crop(self, tokens_to_remove: int) -> None:
        if not tokens_to_remove or self.shared is None:
            return
        self.length = max(0, self.length + tokens_to_remove)
        if self.length < self.layout.length:
            self.move(lambda slots: slots.masked_fill(slots >= self.length, -1), lambda block: block)
        self.tail.crop(self.length)

    def move(self, slots: Callable[[Tensor], Tensor], block: Callable[[Block], Block]) -> None:
        """Change all shared parts; keys and values that share a slots tensor go on sharing one."""
        moved = {id(part.slots): slots(part.slots) for part in self.shared_parts()}
        self.shared = tuple(
            [replace(part, block=block(part.block), slots=moved[id(part.slots)]) for part in side]
            for side in self.shared
        )


def split_weights(
    groups: RowGroups, keys: list[Part], values: list[Part], weights: Tensor, length: int
) -> list[Tensor]:
    """Split folded weights (P, h, g * Q, n) of the keys among the parts of the values.

    Shared parts get (P, h, g * Q, n), others (N, h, Q, n).
    """
    if len(keys) == len(values) and all(
        k.slots is v.slots or k.name == v.name != "" for k, v in zip(keys, values, strict=True)
    ):
        split = weights.split_with_sizes([part.slots.shape[-1] for part in keys], -1)
        return [x if part.shared else groups.unfold(x) for part, x in zip(values, split, strict=True)]
    # Values are stored in another order than keys: scatter weights to the model's slots, then gather them.
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
