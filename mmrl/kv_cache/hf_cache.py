"""The door to the caches of transformers: what a recipe holds, behind the interface that models call."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from mmrl.kv_cache.layer import Held, Recipe
from mmrl.kv_cache.layout import Layout
from mmrl.kv_cache.quantized_attention import teach


def make_cache(config: Any, layout: Layout, recipes: list[Recipe] | Recipe, *, fused: bool) -> Any:
    """Make a `transformers.Cache` for one batch of prompts: one recipe for every layer, or one for all.

    With `fused` the model's attention learns to read codes; without, it gets dense tensors that are made anew
    in every step.
    """
    text = config.get_text_config(decoder=True)
    other = sorted({kind for kind in getattr(text, "layer_types", None) or () if kind != "full_attention"})
    if other:
        raise ValueError(
            f"this cache holds layers of full attention, but a model of type '{text.model_type}' has layers "
            f"of {', '.join(other)}; use its own cache"
        )
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size % 8:
        raise ValueError(f"heads of size {size} do not fill whole bytes; sizes that 8 divides are supported")
    if fused:
        teach(config)
    many = text.num_hidden_layers
    recipes = recipes if isinstance(recipes, list) else [recipes] * many
    heads = text.num_key_value_heads
    return _cache_class()([Held(recipe, layout, fused, heads, size) for recipe in recipes], layout)


@cache
def _layer_class() -> type:
    """Make the class of layers that transformers want. It says nothing of its own: all of it is in `Held`."""
    from transformers.cache_utils import CacheLayerMixin

    class HeldLayer(CacheLayerMixin):
        """One layer."""

        is_sliding = False
        is_croppable = True

        def __init__(self, held: Held) -> None:
            super().__init__()
            self.held = held

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.is_initialized = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple:
            self.is_initialized = True
            return self.held.update(key_states, value_states)

        def get_seq_length(self) -> int:
            return self.held.length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.held.length + query_length, 0

        def get_max_length(self) -> int:
            return -1

        def crop(self, tokens_to_remove: int) -> None:
            if tokens_to_remove > 0:
                raise ValueError(f"`crop` takes minus the number of tokens to drop, not {tokens_to_remove}")
            self.held.crop(-tokens_to_remove)

    return HeldLayer


def total_bytes(layers: list[Held]) -> int:
    """Measure what layers hold, slots that they share once."""
    slots = {place: size for one in layers for place, size in one.slots.items()}
    return sum(one.nbytes for one in layers) + sum(slots.values())


def select_rows(layers: list[Held], rows: Tensor) -> None:
    """Keep rows, in this order, in all layers; a layout that several of them have moves once."""
    moved = {id(layout): layout.select(rows) for layout in dict.fromkeys(one.layout for one in layers)}
    for one in layers:
        one.select(rows, moved[id(one.layout)])


@cache
def _cache_class() -> type:
    """Make the class of caches that transformers want."""
    from transformers.cache_utils import Cache

    make_layer = _layer_class()

    class HeldCache(Cache):
        """All layers, whose rows move together."""

        def __init__(self, held: list[Held], layout: Layout) -> None:
            super().__init__(layers=[make_layer(one) for one in held])
            self.many = len(held)  # layers of the model

        @property
        def nbytes(self) -> int:
            """Measure keys and values with their scales and slots, in bytes."""
            return total_bytes(self._held)

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any) -> tuple:
            if layer_idx >= self.many:
                raise ValueError(
                    f"this cache was made for {self.many} layers, but the model has a layer number "
                    f"{layer_idx}; make the cache from this model's config"
                )
            return super().update(key_states, value_states, layer_idx)

        @property
        def _held(self) -> list[Held]:
            """What the layers of the model hold; behind them a pruned model keeps notes of its own."""
            return [layer.held for layer in self.layers[: self.many]]

        def lay_out(self, layer_idx: int, visual: Tensor, real: Tensor) -> None:
            """Tell which tokens (P, S) arrive at a layer and at those behind it, where some left before."""
            layout = Layout(visual, real)
            for held in self._held[layer_idx:]:
                held.layout = layout

        def batch_select_indices(self, indices: Tensor) -> None:
            if self._held[0].length:
                select_rows(self._held, indices)
                for layer in self.layers[self.many :]:
                    layer.batch_select_indices(indices)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self.batch_select_indices(beam_idx)

        def batch_repeat_interleave(self, repeats: int) -> None:
            owner = self._held[0].layout.owner
            if len(owner):
                self.batch_select_indices(owner.new_tensor(range(len(owner))).repeat_interleave(repeats))

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            for held in self._held:
                held.layout.crop(held.length)

        def reset(self) -> None:
            raise ValueError("this cache belongs to one batch of prompts; make another one for the next")

    return HeldCache
