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

from mmrl.compression.held.layer import Held
from mmrl.compression.held.layout import Part

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
    product, so the prompt is read once for all of them.
    """
    rows, heads, num, size = query.shape
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    asked = (query.to(exact) * scaling).reshape(rows, held.heads, -1, size)
    keys, values = held.parts()
    scores = torch.cat([_scores(held, part, asked, mask, num) for part in keys], -1)
    weights = scores.softmax(-1)
    shares = zip(values, _shares(held, keys, values, weights), strict=True)
    found = reduce(torch.add, (_mixed(held, part, share) for part, share in shares))
    return found.view(rows, heads, num, size).transpose(1, 2).to(query.dtype)


def _scores(held: Held, part: Part, asked: Tensor, mask: Tensor | None, num: int) -> Tensor:
    """Score the tokens of a part: (B, h, Q, D) queries to (B, h, Q, n), the lowest number where nothing is
    seen."""
    layout = held.layout
    shared = part.shared
    scores = layout.unfold(part.block.dots(layout.fold(asked))) if shared else part.block.dots(asked)
    if part.visual and held.recipe.calibrates:
        valid = part.rows(layout) >= 0
        scores = held.recipe.calibrate(scores, _per_head(valid)[:, :, None])
    seen = layout.visible(part, mask, num, held.length)
    if seen is None:
        return scores
    # The queries of a key-value head are its query heads, each with all of the newest tokens.
    scores = scores.unflatten(2, (-1, num))
    seen = seen.unflatten(1, (held.heads, -1)) if seen.shape[1] > 1 else seen[:, :, None]
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).flatten(2, 3)


def _mixed(held: Held, part: Part, weights: Tensor) -> Tensor:
    if not part.shared:
        return part.block.mix(weights)
    return held.layout.unfold(part.block.mix(held.layout.fold(weights)))


def _shares(held: Held, keys: list[Part], values: list[Part], weights: Tensor) -> list[Tensor]:
    """Split (B, h, Q, n) weights among the parts of the values, which may hold tokens in another order than
    the keys."""
    if len(keys) == len(values) and all(
        k.slots is v.slots or k.name == v.name != "" for k, v in zip(keys, values, strict=True)
    ):
        return list(weights.split([part.slots.shape[-1] for part in keys], -1))
    slots = [_per_head(part.rows(held.layout)).expand(-1, held.heads, -1) for part in keys]
    at = torch.cat(slots, -1)[:, :, None].expand(weights.shape)
    # Tokens of no slot have no weight, wherever they are put.
    placed = weights.new_zeros(*weights.shape[:-1], held.length).scatter_add_(-1, at.clamp(min=0), weights)
    shares = []
    for part in values:
        slots = _per_head(part.rows(held.layout))[:, :, None]
        share = placed.gather(-1, slots.clamp(min=0).expand(*weights.shape[:3], -1))
        shares.append(share * (slots >= 0))
    return shares


def _per_head(slots: Tensor) -> Tensor:
    return slots if slots.dim() == 3 else slots[:, None]
