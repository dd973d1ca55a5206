"""The transformers cache of this package: one class for shared prefixes and for quantised formats."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmrl.kv_cache.attention_interface import install
from mmrl.kv_cache.layers import CacheLayer, QuantizedLayer, Recipe, SharedPrefixLayer
from mmrl.kv_cache.layout import PromptLayout


def head_size(text: Any) -> int:
    """Read the channels of an attention head from the config of a text model."""
    # Some families set no size of a head, or null.
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def attention_types(text: Any) -> list[str]:
    """List the distinct types of a text model's layers by its config: full, sliding or chunked attention."""
    settings = text.to_dict()  # which of these there are differs between families
    if types := settings.get("layer_types"):
        return sorted(set(types))
    if settings.get("sliding_window"):
        return ["sliding_attention"]
    return ["full_attention" if settings.get("attention_chunk_size") is None else "chunked_attention"]


def only_attends(text: Any) -> bool:
    """Whether all layers of a text model attend to keys and values, to all of them or in a sliding window."""
    return set(attention_types(text)) <= {"full_attention", "sliding_attention"}


def exact_cache(config: Any) -> Any:
    """Make a `transformers.DynamicCache` whose layers select rows and keep gradients.

    Raises ValueError for layers that keep other things than keys and values or recurrent states (Qwen3.5).
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

    made, known = DynamicCache(config=config), {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}
    if other := sorted({type(layer).__name__ for layer in made.layers if type(layer) not in known}):
        raise ValueError(
            f"models of type '{config.model_type}' cannot be read: {', '.join(other)} of its cache has rows "
            "that cannot be selected"
        )
    made.layers = [
        _recurrent_layer()(layer.number_of_states) if type(layer) is LinearAttentionLayer else layer
        for layer in made.layers
    ]
    return made


@cache
def _recurrent_layer() -> type:
    """Derive a cache layer of linear attention from transformers' own, which writes into its tensors."""
    from transformers.cache_utils import LinearAttentionLayer

    class RecurrentLayer(LinearAttentionLayer):
        """Convolution and recurrent states of rows, replaced in every pass so that gradients flow back."""

        def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
            if self.is_conv_states_initialized[state_idx]:
                self.conv_states[state_idx] = self.conv_states[state_idx].clone()
            return super().update_conv_state(conv_states, state_idx, **options)

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
            self.is_recurrent_states_initialized[state_idx] = True
            self.recurrent_states[state_idx] = recurrent_states
            return recurrent_states

        def batch_select_indices(self, indices: Tensor) -> None:
            self.reorder_cache(indices)

    return RecurrentLayer


def make_cache(
    config: Any, visual: Tensor | None, mask: Tensor | None, recipe: Recipe, *, fused: bool
) -> Any:
    """Make a quantised `transformers.Cache` for one batch of prompts.

    `visual` and `mask` (P, S) mark visual tokens and those that are not padding. With `fused` the model's
    attention reads codes, and its config is changed for that; without, it gets dense tensors that are made
    anew in every step.
    """
    text = config.get_text_config(decoder=True)
    other = sorted({kind for kind in getattr(text, "layer_types", None) or () if kind != "full_attention"})
    if other:
        raise ValueError(
            f"this cache stores layers of full attention, but a model of type '{text.model_type}' has layers "
            f"of {', '.join(other)}; use its own cache"
        )
    size = head_size(text)
    if size % 8:
        raise ValueError(f"heads of size {size} do not fill whole bytes; sizes that 8 divides are supported")
    if fused:
        install(config)
    layout, heads, layer = PromptLayout(visual, mask), text.num_key_value_heads, derive(QuantizedLayer)
    recipes = map(recipe.for_layer, range(text.num_hidden_layers))
    return derive(PromptCache)([layer(each, layout, heads, size, fused=fused) for each in recipes])


LARGER: list[str] = []  # what was said of larger caches, once in a process


def warn_of_larger(cache: Any, config: Any, tokens: int, dtype: torch.dtype) -> None:
    """Warn, once, that a cache of prompts holds more bytes than the exact keys and values would."""
    text, held = config.get_text_config(decoder=True), getattr(cache, "nbytes", 0)
    if not held:  # a cache that does not count
        return
    exact = 2 * text.num_hidden_layers * text.num_key_value_heads * head_size(text) * tokens * dtype.itemsize
    if held > exact and not LARGER:
        LARGER.append(
            f"the KV cache holds {held:,} bytes for {tokens} tokens of prompts, more than the {exact:,} "
            "bytes without it: codes, scales and tables cost more than they save on few tokens; "
            "leave out `cache`, or read longer prompts"
        )
        warnings.warn(LARGER[0], stacklevel=2)


def share_prefix(filled: Any, recorded: list[Tensor], mask: Tensor) -> Any | None:
    """Turn the DynamicCache of prompts, with their mask (P, S), into a cache that rows share.

    Returns None where the model's attention read other keys than the cache's (`recorded`): it then attends in
    a way of its own, and every row needs a copy.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    read = {key.untyped_storage()._cdata for key in recorded}  # views share a storage
    layers = filled.layers
    # Exact types: a class derived from one of these may store something else.
    plain = layers and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    if not plain or not all(
        layer.is_initialized and layer.keys.untyped_storage()._cdata in read for layer in layers
    ):
        return None
    layout, shared = PromptLayout(None, mask), derive(SharedPrefixLayer)
    layout.begin(*mask.shape, mask.device)  # one row per prompt so far
    return derive(PromptCache)(
        [shared(layout, x.keys, x.values, x.sliding_window if x.is_sliding else 0) for x in layers]
    )


@cache
def derive(kind: type) -> type:
    """Derive the cache or a layer from its class in transformers, which is only imported here."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    if issubclass(kind, CacheLayer):
        return type("PromptCacheLayer", (kind, CacheLayerMixin), {})  # a name that pruned models know
    return type("PromptCache", (kind, Cache), {})


class PromptCache:
    """All layers, whose rows move together."""

    layers: list[Any]

    def __init__(self, layers: list[QuantizedLayer] | list[SharedPrefixLayer]) -> None:
        super().__init__(layers=layers)
        self.num_layers = len(layers)

    @property
    def own_layers(self) -> list[QuantizedLayer] | list[SharedPrefixLayer]:
        """The layers of keys and values; a pruned model appends others, to note where tokens left."""
        return self.layers[: self.num_layers]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, scales and slots; slots that layers share count once."""
        slots = (part.slots for layer in self.own_layers for part in layer.shared_parts())
        shared = {x.data_ptr(): x.nbytes for x in slots}
        return sum(layer.nbytes for layer in self.own_layers) + sum(shared.values())

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> tuple:
        """Add keys and values (N, h, t, D) to a layer; return what its attention reads."""
        if layer_idx >= self.num_layers:
            raise ValueError(
                f"this cache was made for {self.num_layers} layers, but the model has a layer number "
                f"{layer_idx}; make the cache from this model's config"
            )
        return self.layers[layer_idx].update(key_states, value_states)

    def lay_out(self, layer_idx: int, visual: Tensor, real: Tensor) -> None:
        """Set the tokens (P, S) that a pruned model keeps from a layer on."""
        layout = PromptLayout(visual, real)
        for layer in self.own_layers[layer_idx:]:
            layer.layout = layout

    @property
    def owners(self) -> list[int]:
        """The number of the prompt that each row answers."""
        return self.layers[0].layout.groups.owner.tolist()

    def prompts(self) -> PromptCache:
        """Make a cache of the same shared prompts, without copies, each with one row that read nothing."""
        layout, (first, *_) = PromptLayout(None, self.layers[0].layout.real), self.layers
        layout.begin(*layout.real.shape, first.keys.device)
        return type(self)([type(x)(layout, x.keys, x.values, x.window) for x in self.layers])

    def own_tokens(self, counts: Sequence[int]) -> list[list[tuple[Tensor, Tensor]]]:
        """View the first `counts` own tokens of every row, by layer: keys and values (h, n, D)."""
        pad = self.layers[0].layout.pad
        places = list(zip([0] * len(counts) if pad is None else pad.tolist(), counts, strict=True))
        return [
            [
                tuple(x[row, :, at : at + n] for x in layer.tail.tensors())
                for row, (at, n) in enumerate(places)
            ]
            for layer in self.layers
        ]

    def fill(self, layers: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """Give every row own tokens, by layer: keys and values (h, n, D); rows may differ in `n`."""
        lengths = [keys.shape[1] for keys, _ in layers[0]]
        layout = self.layers[0].layout
        layout.pad = torch.tensor([max(lengths) - n for n in lengths], device=layout.real.device)
        for layer, rows in zip(self.layers, layers, strict=True):
            layer.tail.fill(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.layers[0].length:  # nothing was read yet, so there are no rows to move
            return
        # Layers of a pruned model have different layouts; one that several layers share moves once.
        layouts = {id(layer.layout): layer.layout for layer in self.own_layers}
        used = {key: layout.select(indices) for key, layout in layouts.items()}
        for layer in self.own_layers:
            layer.select(indices, used[id(layer.layout)])
        for layer in self.layers[self.num_layers :]:
            layer.batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        owner = self.layers[0].layout.groups.owner
        if len(owner):
            self.batch_select_indices(owner.new_tensor(range(len(owner))).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every row, minus `tokens_to_remove` many."""
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes minus the number of tokens to drop, not {tokens_to_remove}")
        super().crop(tokens_to_remove)  # of every layer, those of a pruned model's record included
        # Layers read the length of their prompts while they are cropped, so layouts follow.
        for layer in self.own_layers:
            layer.layout.crop(layer.length)

    def reset(self) -> None:
        """Refuse: a cache is for one batch of prompts."""
        raise ValueError("this cache belongs to one batch of prompts; make another one for the next")
