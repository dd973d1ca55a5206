"""Cache classes for transformers, for shared prompts and quantised formats."""

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
    """Return the number of channels per attention head from the config of a text model."""
    # Some model families set no `head_dim`, or set it to null.
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def attention_types(text: Any) -> list[str]:
    """List the distinct attention types of a text model's layers: full, sliding, chunked, or linear."""
    settings = text.to_dict()  # a dict, because model families set different keys
    if types := settings.get("layer_types"):
        return sorted(set(types))
    if settings.get("sliding_window"):
        return ["sliding_attention"]
    return ["full_attention" if settings.get("attention_chunk_size") is None else "chunked_attention"]


def only_attends(text: Any) -> bool:
    """Whether all layers of a text model are attention layers: full, sliding-window or chunked."""
    return set(attention_types(text)) <= {"full_attention", "sliding_attention", "chunked_attention"}


def stores_nothing(layer: Any) -> bool:
    """Whether a cache layer belongs to a model layer that reuses keys and values of an earlier layer."""
    return type(layer).__name__ == "DummyLayer"  # by name: transformers 5.17 lacks this class


def exact_cache(config: Any) -> Any:
    """Create a `transformers.DynamicCache` whose layers can select rows and support gradients.

    Raises ValueError for layers that store neither keys and values nor recurrent states.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

    dynamic, supported = DynamicCache(config=config), {DynamicLayer, DynamicSlidingWindowLayer}
    supported |= {type(layer) for layer in dynamic.layers if stores_nothing(layer)}
    other = {type(layer).__name__ for layer in dynamic.layers if type(layer) not in supported}
    if other := sorted(other - {LinearAttentionLayer.__name__}):
        raise ValueError(
            f"models of type '{config.model_type}' cannot be read: {', '.join(other)} of its cache has rows "
            "that cannot be selected"
        )
    dynamic.layers = [
        layer if type(layer) in supported else recurrent_layer()(layer.number_of_states)
        for layer in dynamic.layers
    ]
    return dynamic


@cache
def recurrent_layer() -> type:
    """Return a cache layer class for linear attention that, unlike its base, never writes in place."""
    from transformers.cache_utils import LinearAttentionLayer

    class RecurrentLayer(LinearAttentionLayer):
        """Layer whose convolution and recurrent states are replaced in every pass, to support gradients."""

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
    """Create a quantised `transformers.Cache` for one batch of prompts.

    Args:
        config: Config of the model; `fused` changes its attention implementation.
        visual: Mask of visual tokens, (prompts, tokens).
        mask: Mask of tokens that are not padding, (prompts, tokens).
        recipe: The cache format.
        fused: Compute attention on the codes; if false, every step dequantises all tokens.
    """
    text = config.get_text_config(decoder=True)
    if other := sorted({*(getattr(text, "layer_types", None) or ())} - {"full_attention"}):
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


LARGER: list[str] = []  # not empty once `warn_of_larger` has warned


def warn_of_larger(cache: Any, config: Any, tokens: int, dtype: torch.dtype) -> None:
    """Warn once per process if a quantised cache of prompts takes more memory than exact keys and values."""
    text, held = config.get_text_config(decoder=True), getattr(cache, "nbytes", None) or 0
    exact = 2 * text.num_hidden_layers * text.num_key_value_heads * head_size(text) * tokens * dtype.itemsize
    if held > exact and not LARGER:
        LARGER.append(
            f"the KV cache holds {held:,} bytes for {tokens} tokens of prompts, more than the {exact:,} "
            "bytes without it: codes, scales and tables cost more than they save on few tokens; "
            "leave out `cache`, or read longer prompts"
        )
        warnings.warn(LARGER[0], stacklevel=2)


def share_prefix(filled: Any, recorded: list[Tensor], mask: Tensor) -> Any | None:
    """Convert a prefilled DynamicCache to a cache in which several rows share a prompt.

    `mask` (prompts, tokens) is 0 for padding. Returns None if attention read keys (`recorded`) that are
    not those in the cache: such models cannot share prompts, and each row needs a copy.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    read = {key.untyped_storage()._cdata for key in recorded}  # views share a storage
    layers = list(filled.layers)
    while layers and stores_nothing(layers[-1]):
        layers.pop()
    # Exact types, because a derived class may store something else.
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
    """Return a subclass of a cache or cache layer that also inherits from transformers' base class."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    if issubclass(kind, CacheLayer):
        return type("PromptCacheLayer", (kind, CacheLayerMixin), {})  # pruned models check for this name
    return type("PromptCache", (kind, Cache), {})


class PromptCache:
    """A key-value cache of all layers; selecting rows changes all layers."""

    layers: list[Any]

    def __init__(self, layers: list[QuantizedLayer] | list[SharedPrefixLayer]) -> None:
        super().__init__(layers=layers)
        self.num_layers = len(layers)

    @property
    def own_layers(self) -> list[QuantizedLayer] | list[SharedPrefixLayer]:
        """The layers with keys and values; pruned models append others, which record removed tokens."""
        return self.layers[: self.num_layers]

    @property
    def nbytes(self) -> int:
        """Memory of keys, values, scales and slots in bytes; slots that layers share count once."""
        slots = (part.slots for layer in self.own_layers for part in layer.shared_parts())
        shared = {x.data_ptr(): x.nbytes for x in slots}
        return sum(layer.nbytes for layer in self.own_layers) + sum(shared.values())

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> tuple:
        """Append keys and values (rows, heads, tokens, channels) to a layer; return its attention inputs."""
        if layer_idx >= self.num_layers:
            raise ValueError(
                f"this cache was made for {self.num_layers} layers, but the model has a layer number "
                f"{layer_idx}; make the cache from this model's config"
            )
        return self.layers[layer_idx].update(key_states, value_states)

    def lay_out(self, layer_idx: int, visual: Tensor, real: Tensor) -> None:
        """Set the masks (prompts, tokens) of visual and non-padding tokens for layers from `layer_idx` on."""
        layout = PromptLayout(visual, real)
        for layer in self.own_layers[layer_idx:]:
            layer.layout = layout

    @property
    def owners(self) -> list[int]:
        """The index of the prompt that each row answers."""
        return self.layers[0].layout.groups.owner.tolist()

    def prompts(self) -> PromptCache:
        """Return a cache with one row per shared prompt and no own tokens; keys and values are not copied."""
        layout, (first, *_) = PromptLayout(None, self.layers[0].layout.real), self.layers
        layout.begin(*layout.real.shape, first.keys.device)
        return type(self)([type(x)(layout, x.keys, x.values, x.window) for x in self.layers])

    def own_tokens(self, counts: Sequence[int]) -> list[list[tuple[Tensor, Tensor]]]:
        """Return views of the first `counts[i]` own tokens of row i: `[layer][row]` is (keys, values)."""
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
        """Set the own tokens of every row: `layers[layer][row]` is (keys, values)."""
        lengths = [keys.shape[1] for keys, _ in layers[0]]
        layout = self.layers[0].layout
        layout.pad = torch.tensor([max(lengths) - n for n in lengths], device=layout.real.device)
        for layer, rows in zip(self.layers, layers, strict=True):
            layer.tail.fill(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.layers[0].length:  # the cache is still empty
            return
        # Layers of a pruned model may have different layouts; select each layout only once.
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
        """Raise ValueError, because quantised and shared tokens cannot be removed."""
        raise ValueError("this cache drops no tokens; make another one and read the tokens that stay")

    def reset(self) -> None:
        """Raise ValueError, because a cache belongs to one batch of prompts."""
        raise ValueError("this cache belongs to one batch of prompts; make another one for the next")

    def rows_as_prompts(self, rows: Tensor, count: Tensor) -> PromptCache:
        """Return a cache in which rows of this cache (prompt and own tokens) become shared prompts.

        Only for caches of `share_prefix`; gradients are kept. `rows` (n,) are indices. The first `count[i]`
        own tokens of row i are used, all later ones are padding. Both tensors are on the device of the cache.
        """
        layout: PromptLayout = self.layers[0].layout
        owner, added = layout.groups.owner[rows], self.layers[0].length - layout.length
        sizes = layout.real.sum(1)[owner] + count[rows]  # (n,) tokens without padding
        size = int(sizes.max())
        real = torch.arange(size, device=rows.device) >= size - sizes[:, None]  # padded on the left
        grown = PromptLayout(None, real)
        grown.begin(len(rows), size, rows.device)
        padding = added - count[rows]

        def joined(prompts: Tensor, tail: Tensor, window: int) -> Tensor:
            whole = torch.cat([prompts[owner], tail[rows]], 2)
            length = whole.shape[2]
            # A sliding-window layer stores window - 1 tokens.
            stored = min(size, length, max(1, window - 1) if window else size)
            index = (
                torch.arange(length - stored, length, device=rows.device) - padding[:, None]
            )  # (rows, stored)
            return whole.take_along_dim(index.clamp(min=0)[:, None, :, None], 2)

        layers = []
        for layer in self.own_layers:
            sides = zip((layer.keys, layer.values), layer.tail.tensors(), strict=True)
            keys, values = (joined(prompts, tail, layer.window) for prompts, tail in sides)
            layers.append(type(layer)(grown, keys, values, layer.window))
        return type(self)(layers)
