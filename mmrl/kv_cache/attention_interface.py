"""Attention function, registered with transformers, that reads the caches of this package.

A model finds its attention function by the name in its config, and calls it with the keys and values that its
cache returns: tensors, or a cache layer of this package, which then computes attention itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kv_cache.layers import CacheLayer

PREFIX, UNMASKED = "mmrl_", "mmrl_unmasked"
BASES = ("sdpa", "eager")
# Arguments of attention functions that merged attention does not support.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q")
_RECORDED: ContextVar[list[Tensor] | None] = ContextVar("recorded", default=None)


def register(base: str) -> str:
    """Register an attention function with transformers that reads this package's caches; return its name.

    Plain tensors are passed to the implementation `base`, such as sdpa. Its mask function is registered, too,
    because transformers silently omits masks otherwise. The implementation UNMASKED has no mask function on
    purpose: shared prefixes know their padding, and creating a mask in each step would cost time.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if base.startswith(PREFIX):
        return base
    name = PREFIX + base
    AttentionInterface.register(name, partial(attend, base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    AttentionInterface.register(UNMASKED, partial(attend, "none"))  # supports cache layers only
    return name


def attention_of(config: Any) -> str:
    """Return the model's attention implementation, without the prefix of this package."""
    return (config.get_text_config(decoder=True)._attn_implementation or "sdpa").removeprefix(PREFIX)


def install(config: Any) -> None:
    """Change a model's config so that its attention can read quantised caches from now on."""
    text = config.get_text_config(decoder=True)
    base = text._attn_implementation or "sdpa"
    if attention_of(config) not in BASES:
        raise ValueError(
            f"quantised caches work with the attention '{' or '.join(BASES)}', not '{base}'; load the model "
            "with one of them, or give the cache `fused: false` where it has this option"
        )
    text._attn_implementation = register(base)


@contextmanager
def use_attention(config: Any, name: str) -> Iterator[None]:
    """Set the attention implementation of a model inside this context."""
    text = config.get_text_config(decoder=True)
    before = text._attn_implementation
    text._attn_implementation = name
    try:
        yield
    finally:
        text._attn_implementation = before


def read_shared_prefix(config: Any) -> AbstractContextManager[None]:
    """Let a model attend to a cache with a shared prefix inside this context."""
    return use_attention(config, UNMASKED)


@contextmanager
def record_keys(config: Any) -> Iterator[list[Tensor]]:
    """Yield a list that collects the keys passed to attention; empty for masks unlike sdpa's and eager's."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    base = config.get_text_config(decoder=True)._attn_implementation or "sdpa"
    recorded: list[Tensor] = []
    if MASKS.get(base) not in (MASKS["sdpa"], MASKS["eager"]):
        yield recorded
        return
    token = _RECORDED.set(recorded)
    try:
        with use_attention(config, register(base)):
            yield recorded
    finally:
        _RECORDED.reset(token)


def attend(
    base: str, module: nn.Module, query: Tensor, key: Tensor | CacheLayer, value: Tensor | CacheLayer,
    attention_mask: Tensor | None, scaling: float | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend from queries (rows, heads, tokens, channels) to a cache layer, or use `base` for tensors."""
    match key:
        case CacheLayer() as layer:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            if layer.pending is None:
                return layer.attend(query, attention_mask, scaling), None
            # First pass over a prompt: cache methods score tokens by these queries, to select which to store.
            key, value = layer.pending  # read before `score`, which clears it after the last layer
            repeats = len(query) // len(key)
            layer.recipe.score(layer, query[::repeats], scaling)
            key, value = (x.repeat_interleave(repeats, 0) if repeats > 1 else x for x in (key, value))
        case Tensor():
            if together := others.pop("sequence_parallel", None):
                return together.attend(query, key, value, scaling)
            if sizes := others.pop("packed_sizes", None):
                parts = _of_parts(query, key, value, attention_mask, sizes)
                results = [attend(base, module, *part, scaling, **others)[0] for part in parts]
                return torch.cat(results, 1), None
            recorded = _RECORDED.get()
            if recorded is not None and all(others.get(name) is None for name in UNSUPPORTED):
                recorded.append(key)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Eager attention is defined in each modeling file of transformers.
    eager = getattr(inspect.getmodule(type(module)), "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)
    return function(module, query, key, value, attention_mask, scaling=scaling, **others)


def _of_parts(
    query: Tensor, key: Tensor, value: Tensor, masks: Tensor | None, sizes: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Split a packed sequence (1, heads, S, channels) into parts of `sizes`, each with its mask (1, 1, s, s).

    `masks` (1, 1, 1, sum of squared sizes) holds the flattened masks of all parts, one after another. If it
    is None or empty, every part has a causal mask, which the attention function applies itself.
    """
    flat = None if masks is None or not masks.numel() else masks.flatten()
    split = zip(*(x.split(list(sizes), 2) for x in (query, key, value)), sizes, strict=True)
    begin = 0
    for q, k, v, size in split:
        mask = None if flat is None else flat[begin : begin + size * size].view(1, 1, size, size)
        begin += size * size
        yield q, k, v, mask
