"""Attention to a shared prefix and to each row's own tokens, merged by log-sum-exp, with gradients.

With the log-sum-exp n_i of the scores of part i and the softmax output o_i over that part alone, attention to
both parts is

    n = log(exp(n_1) + exp(n_2)),    o = exp(n_1 - n) o_1 + exp(n_2 - n) o_2,

so the keys and values of the prefix are stored once for all its rows. In the backward pass the attention
weights are p = exp(scores - n) for keys of either part, and the gradient of a score is p (g . v - g . o). The
gradients of one part therefore need n and o of the merged attention, and nothing else of the other part.
(Sharing prefixes in training: Prefix Grouper, arXiv 2506.05433; merging and backward pass: our reading.)

Shapes: `N` rows answer `P` prompts. There are `H` query heads of `D` channels; H / h of them share each of
the `h` key heads. The `t` new tokens of a row attend to `S` tokens of its prompt and `T` own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from mmrl.kv_cache.row_groups import RowGroups

MAX_SCORES = 1 << 25  # attention scores in memory at once if torch has no fused kernel
Pair = tuple[Tensor, Tensor]  # keys and values


def attend_merged(
    query: Tensor, prefix: Pair, own: Pair, groups: RowGroups, scaling: float,
    prefix_mask: Tensor | None = None, own_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from every row's newest tokens to its prompt and its own tokens; return (N, H, t, D).

    Args:
        query: Queries: N rows, H query heads, t new tokens, D channels.
        prefix: Keys and values of P prompts of S tokens, (P, h, S, D) each.
        own: Keys and values of the rows' own tokens, (N, h, T, D) each; the last t are the query tokens.
        groups: Which prompt each row answers.
        scaling: Factor of the scores.
        prefix_mask: Added to the scores of prompt tokens, (P, 1, 1 or t, S).
        own_mask: Added to the scores of own tokens, (t, T); None: causal.
    """
    rows, heads, num, _ = query.shape
    kv_heads, length = prefix[0].shape[1], own[0].shape[2]
    if num == 1 and not torch.is_grad_enabled():
        return attend_one_token(query, prefix, own, groups, scaling, prefix_mask, own_mask)
    repeats = heads // kv_heads
    if prefix_mask is not None and prefix_mask.shape[2] > 1:
        prefix_mask = groups.tile(prefix_mask, repeats)
    causal = own_mask is None and num > 1
    if causal and length != num:
        # The kernel's causal mask aligns the first query with the first key; here the last ones must align.
        own_mask, causal = causal_mask(num, length, query), False
    # With one new token, the query heads that share a key head are queries of one product: (N h, 1, H/h, D).
    # With several, each query head gets a view of its key head (no copy), so that the kernel's causal mask
    # applies: (N h, H/h, t, D).
    shape = (1, repeats) if num == 1 else (repeats, num)
    own = tuple(x.flatten(0, 1)[:, None].expand(-1, shape[0], -1, -1) for x in own)
    parts = (
        _prefix_part(groups, kv_heads, num, prefix_mask, scaling),
        _Part(
            fold=lambda x: x.reshape(rows * kv_heads, *shape, *x.shape[3:]),
            unfold=lambda x: x.reshape(rows, heads, num, *x.shape[3:]),
            mask=None if own_mask is None else own_mask[None, None],
            causal=causal,
            scaling=scaling,
        ),
    )
    return _MergedAttention.apply(query, *prefix, *own, parts)


def attend_one_token(
    query: Tensor, prefix: Pair, own: Pair, groups: RowGroups, scaling: float, prefix_mask: Tensor | None,
    own_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend like `attend_merged`, for one new token per row, without gradients, in few operator calls."""
    rows, heads, _, size = query.shape
    query = query.reshape(rows, prefix[0].shape[1], -1, size)  # query heads grouped by key head
    if _is_fused(query, prefix[1], prefix_mask, own_mask):
        out, norm = _with_norm(groups.fold(query), *prefix, prefix_mask, scaling)
        own_out, own_norm = _with_norm(query, *own, own_mask, scaling)
        # weight of the prompt: exp(n_1 - n) = 1 / (1 + exp(n_2 - n_1)), n_i: log-sum-exp of part i
        share = (groups.unfold(norm) - own_norm).sigmoid_()[..., None]
        merged = torch.lerp(own_out.to(share.dtype), groups.unfold(out).to(share.dtype), share)
        return merged.to(query.dtype).reshape(rows, heads, 1, size)
    length, exact = prefix[0].shape[2], torch.promote_types(query.dtype, torch.float32)
    scores = groups.fold(query) @ prefix[0].mT
    scores = groups.unfold(scores if prefix_mask is None else scores.add_(prefix_mask))
    own_scores = query @ own[0].mT
    own_scores = own_scores if own_mask is None else own_scores.add_(own_mask)
    scores = torch.cat([scores, own_scores], -1).to(exact) * scaling
    weights = scores.softmax(-1).to(query.dtype)
    out = groups.unfold(groups.fold(weights[..., :length]) @ prefix[1])
    out += weights[..., length:] @ own[1]
    return out.flatten(1, 2)[:, :, None]


@torch.no_grad()
def attend_padded(
    query: Tensor, prefix: Pair, own: Pair, groups: RowGroups, scaling: float, prefix_mask: Tensor | None,
    own_mask: Tensor, *, window: int = 0,
) -> Tensor:  # fmt: skip
    """Attend like `attend_merged`, for rows whose own tokens are padded on the left, without gradients.

    `own_mask` (rows, 1, 1 or new tokens, own tokens) hides the padding, and tokens outside a sliding `window`
    (0: none). `prefix_mask` has the query order of `RowGroups.fold`. New tokens attend causally.
    """
    rows, heads, num, _ = query.shape
    kv_heads, older = prefix[0].shape[1], own[0].shape[2] - num
    if num == 1:
        return attend_one_token(query, prefix, own, groups, scaling, prefix_mask, own_mask)
    each = _Part(
        fold=lambda x: x.reshape(rows * kv_heads, -1, num, *x.shape[3:]),
        unfold=lambda x: x.reshape(rows, heads, num, *x.shape[3:]),
        mask=None,
        scaling=scaling,
    )
    # Treat older and newest own tokens as separate parts: older tokens need one mask line per row, the newest
    # only the kernel's causal mask. So no mask has the size of all scores.
    keys, values = (x.flatten(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1) for x in own)
    mask = own_mask[..., :older].repeat_interleave(kv_heads, 0)
    newest = causal_mask(num, num, query, window) if 0 < window < num else None
    parts = (
        (_prefix_part(groups, kv_heads, num, prefix_mask, scaling), *prefix),
        (replace(each, mask=mask), keys[:, :, :older], values[:, :, :older]),
        (
            replace(each, mask=None if newest is None else newest[None, None], causal=newest is None),
            keys[:, :, older:],
            values[:, :, older:],
        ),
    )
    out, norm = zip(*(part.attend(query, *pair) for part, *pair in parts if pair[0].shape[2]), strict=True)
    total = torch.stack(norm).logsumexp(0)
    weighted = (x * (n - total).exp()[..., None] for x, n in zip(out, norm, strict=True))
    return reduce(torch.add, weighted).to(query.dtype)


@dataclass(frozen=True, eq=False)
class _Part:
    """Attention to some of the keys (prompt or own tokens); `fold` reshapes queries, `unfold` undoes it."""

    fold: Callable[[Tensor], Tensor]
    unfold: Callable[[Tensor], Tensor]
    mask: Tensor | None
    scaling: float
    causal: bool = False

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to this part of the keys alone; return output and log-sum-exp of the scores per query."""
        query = self.fold(query)
        if _is_fused(query, values, self.mask):
            out, norm = _with_norm(query, keys, values, self.mask, self.scaling, self.causal)
        else:
            pieces = []
            for _, scores in self._scores(query, keys):
                piece = scores.logsumexp(-1)
                weights = (scores - piece[..., None]).exp().to(values.dtype)
                pieces.append(((weights @ values).to(query.dtype), piece))
            out, norm = (torch.cat(x, 2) for x in zip(*pieces, strict=True))
        return self.unfold(out), self.unfold(norm)

    def backward(
        self, grad: Tensor, query: Tensor, out: Tensor, norm: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of queries, keys and values from `out` and `norm` of the merged attention."""
        grad, query, out, norm = (self.fold(x) for x in (grad, query, out, norm))
        if _is_fused(query, values, self.mask):
            d_query, d_keys, d_values = _gradients(
                grad, query, keys, values, out, norm, self.mask, self.scaling, self.causal
            )
            return self.unfold(d_query), d_keys, d_values
        delta = (grad.to(norm.dtype) * out.to(norm.dtype)).sum(-1, keepdim=True)  # gradient . output
        d_query, d_keys, d_values = [], keys.new_zeros(keys.shape), values.new_zeros(values.shape)
        for rows, scores in self._scores(query, keys):
            weights = (scores - norm[:, :, rows, None]).exp()
            d_values += weights.to(grad.dtype).mT @ grad[:, :, rows]
            # d score = p (g . v - g . o), see the top of this file
            d_scores = (grad[:, :, rows] @ values.mT).to(norm.dtype) - delta[:, :, rows]
            d_scores = (weights * d_scores * self.scaling).to(query.dtype)
            d_query.append(d_scores @ keys)
            d_keys += d_scores.mT @ query[:, :, rows]
        return self.unfold(torch.cat(d_query, 2)), d_keys, d_values

    def _scores(self, query: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of folded queries and their scores (float32 or wider), `MAX_SCORES` at a time."""
        num = query.shape[2]
        mask = causal_mask(num, num, query) if self.causal else self.mask
        size = max(1, MAX_SCORES // max(1, query.shape[0] * query.shape[1] * keys.shape[2]))
        for start in range(0, num, size):
            rows = slice(start, min(num, start + size))
            scores = query[:, :, rows] @ keys.mT
            scores = scores.to(torch.promote_types(query.dtype, torch.float32)) * self.scaling
            if mask is not None:
                scores = scores + (mask if mask.shape[-2] == 1 else mask[..., rows, :])
            yield rows, scores


def _prefix_part(groups: RowGroups, kv_heads: int, num: int, mask: Tensor | None, scaling: float) -> _Part:
    """Return the part of attention to the prompts; one matrix product serves all rows of a prompt."""
    return _Part(
        fold=lambda x: groups.fold(x.unflatten(1, (kv_heads, -1)).flatten(2, 3)),
        unfold=lambda x: groups.unfold(x).unflatten(2, (-1, num)).flatten(1, 2),
        mask=mask,
        scaling=scaling,
    )


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor,
        parts: tuple[_Part, _Part],
    ) -> Tensor:  # fmt: skip
        out, norm = parts[0].attend(query, keys, values)
        own_out, own_norm = parts[1].attend(query, own_keys, own_values)
        total = torch.logaddexp(norm, own_norm)
        out = out * (norm - total).exp()[..., None]
        out = (out + own_out * (own_norm - total).exp()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, out, total)
        ctx.parts = parts
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, out, total = ctx.saved_tensors
        d_query, *d_prefix = ctx.parts[0].backward(grad, query, out, total, keys, values)
        d_own_query, *d_own = ctx.parts[1].backward(grad, query, out, total, own_keys, own_values)
        return d_query + d_own_query, *d_prefix, *d_own, None


@cache
def _runs_flash(device: torch.device) -> bool:
    flash = torch.backends.cuda.is_flash_attention_available()
    return flash and torch.cuda.get_device_capability(device) >= (8, 0)


def _is_fused(query: Tensor, values: Tensor, *masks: Tensor | None) -> bool:
    """Whether torch has a fused kernel that also returns the log-sum-exp; on a GPU it supports no masks."""
    size = query.shape[-1]
    if size != values.shape[-1] or not query.is_cuda:
        return size == values.shape[-1] and query.device.type == "cpu"
    fits = query.dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256
    return fits and all(x is None for x in masks) and _runs_flash(query.device)


def _with_norm(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend with a fused kernel of torch; return the output and the log-sum-exp of the scores."""
    if query.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, keys, values, 0.0, causal, scale=scaling)[:2]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, keys, values, 0.0, causal, attn_mask=mask, scale=scaling)


def _gradients(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, norm: Tensor,
    mask: Tensor | None, scaling: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of queries, keys and values with torch's fused backward kernel."""
    tensors = grad, query, keys, values, out, norm.contiguous()
    if query.is_cuda:
        lengths, none = (query.shape[2], keys.shape[2]), norm.new_empty(0, dtype=torch.int64)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        # Arguments: no packed sequences (None) and no dropout state (`none`).
        return flash(*tensors, None, None, *lengths, 0.0, causal, none, none, scale=scaling)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(*tensors, 0.0, causal, attn_mask=mask, scale=scaling)


def causal_mask(num: int, length: int, like: Tensor, window: int = 0) -> Tensor:
    """Return the additive causal mask (num, length) for the `num` newest of `length` tokens.

    `window` is the number of tokens that a token can attend to, itself included; 0: all.
    """
    newest = torch.arange(length - num, length, device=like.device)[:, None]
    ago = newest - torch.arange(length, device=like.device)
    hidden = (ago < 0) | (ago >= window) if window else ago < 0
    return additive_mask(hidden, like)


def additive_mask(hidden: Tensor, like: Tensor) -> Tensor:
    """Convert a bool mask (True: hidden key) to an additive mask.

    The values are finite: if all keys of a part are hidden, its weight in the merged attention is 0, not NaN.
    """
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, torch.finfo(like.dtype).min
    )
