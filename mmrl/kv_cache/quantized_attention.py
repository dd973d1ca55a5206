"""Attention over the parts of a quantised cache, whose codes are read without being dequantised first."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from mmrl.kv_cache.blocks import per_head
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.row_groups import RowGroups

Calibrate = Callable[[Tensor, Tensor], Tensor]  # scores and which are valid to scores


def attend_parts(
    query: Tensor, parts: tuple[list[Part], list[Part]], layout: PromptLayout, mask: Tensor | None,
    scaling: float, length: int, kv_heads: int, calibrate: Calibrate | None,
) -> Tensor:  # fmt: skip
    """Attend from (N, H, t, D) queries to parts of keys and of values: (N, t, H, D).

    The scores of all parts are concatenated for one softmax. Rows of one prompt are queries of one product,
    so that the prompt is read once for all of them, and they stay folded until scores are weights. `mask` is
    the model's, over `length` slots; `calibrate` changes the scores of visual tokens.
    """
    rows, heads, num, size = query.shape
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    asked = (query.to(exact) * scaling).reshape(rows, kv_heads, -1, size)
    keys, values = parts
    scores = _scores(layout.groups, keys, asked, calibrate)
    hidden = layout.hidden(keys, mask, num, length, (kv_heads, heads // kv_heads))
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(exact).min)
    weights = _weights_by_part(layout.groups, parts, scores.softmax(-1), length)
    sums: dict[bool, list[Tensor]] = {}
    for part, weight in zip(values, weights, strict=True):
        sums.setdefault(part.shared, []).append(part.block.mix(weight))
    out = [reduce(torch.add, x) for x in sums.values()]
    out = [layout.groups.unfold(x) if shared else x for shared, x in zip(sums, out, strict=True)]
    return reduce(torch.add, out).reshape(rows, heads, num, size).transpose(1, 2).to(query.dtype)


def _scores(groups: RowGroups, parts: list[Part], asked: Tensor, calibrate: Calibrate | None) -> Tensor:
    """Score all tokens: queries (N, h, Q, D) to folded scores (P, h, g * Q, n)."""
    folded = groups.fold(asked)
    scores = []
    for part in parts:
        score = part.block.dots(folded if part.shared else asked)
        if part.visual and calibrate:
            score = calibrate(score, per_head(part.slots >= 0)[:, :, None])
        scores.append(score if part.shared else groups.fold(score))
    return torch.cat(scores, -1)


def _weights_by_part(
    groups: RowGroups, parts: tuple[list[Part], list[Part]], weights: Tensor, length: int
) -> list[Tensor]:
    """Split folded weights (P, h, g * Q, n) of the keys among the parts of the values.

    Shared parts get (P, h, g * Q, n), others (N, h, Q, n).
    """
    keys, values = parts
    if len(keys) == len(values) and all(
        k.slots is v.slots or k.name == v.name != "" for k, v in zip(keys, values, strict=True)
    ):
        split = weights.split_with_sizes([part.slots.shape[-1] for part in keys], -1)
        return [
            weight if part.shared else groups.unfold(weight)
            for part, weight in zip(values, split, strict=True)
        ]
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
