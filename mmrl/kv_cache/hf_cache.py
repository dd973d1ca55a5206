"""The transformers cache of this package: one class for shared prefixes and for quantised formats."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from mmrl.kv_cache.attention_interface import install
from mmrl.kv_cache.layers import QuantizedLayer, Recipe, SharedPrefixLayer
from mmrl.kv_cache.layout import PromptLayout


def make_cache(config: Any, layout: PromptLayout, recipes: list[Recipe] | Recipe, *, fused: bool) -> Any:
    """Make a quantised `transformers.Cache` for one batch of prompts: one recipe per layer, or one for all.

    With `fused` the model's attention reads codes, and its config is changed for that; without, it gets dense
    tensors that are made anew in every step.
    """
    text = config.get_text_config(decoder=True)
    other = sorted({kind for kind in getattr(text, "layer_types", None) or () if kind != "full_attention"})
    if other:
        raise ValueError(
            f"this cache stores layers of full attention, but a model of type '{text.model_type}' has layers "
            f"of {', '.join(other)}; use its own cache"
        )
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size % 8:
        raise ValueError(f"heads of size {size} do not fill whole bytes; sizes that 8 divides are supported")
    if fused:
        install(config)
    recipes = recipes if isinstance(recipes, list) else [recipes] * text.num_hidden_layers
    heads = text.num_key_value_heads
    return _classes()[0]([QuantizedLayer(recipe, layout, heads, size, fused=fused) for recipe in recipes])


def share_prefix(filled: Any, recorded: list[Tensor], mask: Tensor) -> Any | None:
    """Turn the DynamicCache of prompts, with their mask (P, S), into a cache that rows share.

    Returns None where the model's attention read other keys than the cache's (`recorded`): it then attends in
    a way of its own, and every row needs a copy.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    read = {key.untyped_storage().data_ptr() for key in recorded}
    layers = filled.layers
    plain = layers and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    if not plain or not all(
        layer.is_initialized and layer.keys.untyped_storage().data_ptr() in read for layer in layers
    ):
        return None
    layout = PromptLayout(None, mask)
    layout.begin(*mask.shape, mask.device)
    windows = [layer.sliding_window if layer.is_sliding else 0 for layer in layers]
    return _classes()[0](
        [
            SharedPrefixLayer(layout, layer.keys, layer.values, window)
            for layer, window in zip(layers, windows, strict=True)
        ]
    )


@cache
def _classes() -> tuple[type, type]:
    """Derive the cache and the layer class from those of transformers, which are only imported here."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    return (
        type("PromptCache", (_PromptCache, Cache), {}),
        type("PromptCacheLayer", (_PromptCacheLayer, CacheLayerMixin), {}),
    )


class _PromptCacheLayer:
    """One layer as transformers call it; `content` does the work."""

    is_sliding = False
    is_croppable = True

    def __init__(self, content: QuantizedLayer | SharedPrefixLayer) -> None:
        super().__init__()
        self.content = content
        self.is_initialized = content.length > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple:
        self.is_initialized = True
        return self.content.update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.content.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.content.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes minus the number of tokens to drop, not {tokens_to_remove}")
        self.content.crop(-tokens_to_remove)


class _PromptCache:
    """All layers, whose rows move together."""

    def __init__(self, contents: list[QuantizedLayer] | list[SharedPrefixLayer]) -> None:
        super().__init__(layers=[_classes()[1](content) for content in contents])
        self.num_layers = len(contents)

    @property
    def _contents(self) -> list[QuantizedLayer] | list[SharedPrefixLayer]:
        # A pruned model appends layers of its own, in which it notes where tokens left.
        return [layer.content for layer in self.layers[: self.num_layers]]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, scales and slots; slots that layers share count once."""
        slots = {place: size for content in self._contents for place, size in content.slot_bytes().items()}
        return sum(content.nbytes for content in self._contents) + sum(slots.values())

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> tuple:
        if layer_idx >= self.num_layers:
            raise ValueError(
                f"this cache was made for {self.num_layers} layers, but the model has a layer number "
                f"{layer_idx}; make the cache from this model's config"
            )
        return super().update(key_states, value_states, layer_idx)

    def lay_out(self, layer_idx: int, visual: Tensor, real: Tensor) -> None:
        """Set the tokens (P, S) that a pruned model keeps from a layer on."""
        layout = PromptLayout(visual, real)
        for content in self._contents[layer_idx:]:
            content.layout = layout

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self._contents[0].length:
            return
        # Layers of a pruned model have different layouts; one that several layers share moves once.
        layouts = {id(content.layout): content.layout for content in self._contents}
        used = {key: layout.select(indices) for key, layout in layouts.items()}
        for content in self._contents:
            content.select(indices, used[id(content.layout)])
        for layer in self.layers[self.num_layers :]:
            layer.batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        owner = self._contents[0].layout.groups.owner
        if len(owner):
            self.batch_select_indices(owner.new_tensor(range(len(owner))).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for content in self._contents:
            content.layout.crop(content.length)

    def reset(self) -> None:
        raise ValueError("this cache belongs to one batch of prompts; make another one for the next")
