"""Attention that reads codes: what transformers call instead of their own where a cache hands them itself.

`teach` puts it in front of a model's attention, which goes on unchanged where keys and values are tensors.
The mask must be registered as well: without it transformers drop the causal and the padding mask silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kv_cache.layer import Held
from mmrl.kv_cache.layout import Part, per_head

PREFIX = "codes_"
BASES = ("sdpa", "eager")


def teach(config: Any) -> None:
    """Let the attention of a model read codes, through its live config."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    text = config.get_text_config(decoder=True)
    base = text._attn_implementation or "sdpa"
    if base.startswith(PREFIX):
        return
    if base not in BASES:
        raise ValueError(
            f"codes are read behind the attention '{' or '.join(BASES)}', not '{base}'; load the model with "
            "one of them, or give the cache `fused: false` where it has this option"
        )
    AttentionInterface.register(PREFIX + base, partial(read, base))
    AttentionMaskInterface.register(PREFIX + base, ALL_MASK_ATTENTION_FUNCTIONS[base])
    text._attn_implementation = PREFIX + base


def read(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor | Held,
    value: Tensor | Held,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to tensors as `base` does, and to what a cache holds straight from codes: (B, T, H, D)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = partial(_function(base, module), module, query, scaling=scaling, **others)
    match key:
        case Tensor():
            return plain(key, value, attention_mask)
        case Held(fresh=None):
            return attend(key, query, attention_mask, scaling), None
    times = len(query) // len(key.fresh[0])
    keys, values = (x.repeat_interleave(times, 0) if times > 1 else x for x in key.fresh)
    key.recipe.watch(key, query[::times], scaling)
    return plain(keys, values, attention_mask)


def _function(base: str, module: nn.Module) -> Callable:
    """Find the attention of a name; every file of models has an eager one of its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = inspect.getmodule(type(module))
    return ALL_ATTENTION_FUNCTIONS.get_interface(base, getattr(own, "eager_attention_forward", None))


def attend(held: Held, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend from (B, H, T, D) queries to everything that a layer holds: (B, T, H, D).

    Scores of all parts stand side by side for one softmax. Rows that answer one prompt are queries of one
    product, so the prompt is read once for all of them, and scores stay brought together until they are
    weights.
    """
    rows, heads, num, size = query.shape
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    asked = (query.to(exact) * scaling).reshape(rows, held.heads, -1, size)
    keys, values = held.parts()
    scores = _scores(held, keys, asked)
    hidden = held.layout.hidden(keys, mask, num, held.length, (held.heads, heads // held.heads))
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(exact).min)
    found = _mixed(held, values, _shares(held, keys, values, scores.softmax(-1)))
    return found.reshape(rows, heads, num, size).transpose(1, 2).to(query.dtype)


def _scores(held: Held, parts: list[Part], asked: Tensor) -> Tensor:
    """Score all tokens: queries (B, h, Q, D) to (P, h, g * Q, N), rows of one prompt together."""
    layout = held.layout
    together = layout.fold(asked)
    found = []
    for part in parts:
        scores = part.block.dots(together if part.shared else asked)
        if part.visual and held.recipe.calibrates:
            scores = held.recipe.calibrate(scores, per_head(part.slots >= 0)[:, :, None])
        found.append(scores if part.shared else layout.fold(scores))
    return torch.cat(found, -1)


def _mixed(held: Held, parts: list[Part], shares: list[Tensor]) -> Tensor:
    """Add up all tokens by their weights: (B, h, Q, D). Shares of a shared part have rows of one prompt
    together."""
    found: dict[bool, Tensor] = {}
    for part, share in zip(parts, shares, strict=True):
        one = part.block.mix(share)
        found[part.shared] = found[part.shared] + one if part.shared in found else one
    if True in found:
        found[True] = held.layout.unfold(found[True])
    return reduce(torch.add, found.values())


def _shares(held: Held, keys: list[Part], values: list[Part], weights: Tensor) -> list[Tensor]:
    """Split weights (P, h, g * Q, N) among the parts of the values: for shared ones (P, h, g * Q, n), for
    others (B, h, Q, n). Values may stand in another order than keys."""
    layout = held.layout
    if len(keys) == len(values) and all(
        k.slots is v.slots or k.name == v.name != "" for k, v in zip(keys, values, strict=True)
    ):
        split = weights.split_with_sizes([part.slots.shape[-1] for part in keys], -1)
        return [
            share if part.shared else layout.unfold(share) for part, share in zip(values, split, strict=True)
        ]
    weights = layout.unfold(weights)
    slots = [per_head(part.rows(layout)).expand(-1, held.heads, -1) for part in keys]
    at = torch.cat(slots, -1)[:, :, None].expand(weights.shape)
    # Tokens of no slot have no weight, wherever they are put.
    placed = weights.new_zeros(*weights.shape[:-1], held.length).scatter_add_(-1, at.clamp(min=0), weights)
    shares = []
    for part in values:
        slots = per_head(part.rows(layout))[:, :, None]
        share = placed.gather(-1, slots.clamp(min=0).expand(*weights.shape[:3], -1)) * (slots >= 0)
        shares.append(layout.fold(share) if part.shared else share)
    return shares
