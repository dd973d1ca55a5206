"""Attention to a shared prefix and to each row's own tokens, merged by log-sum-exp, with its gradients.

With the log-sum-exp n_i of the scores of part i and the softmax output o_i over that part alone, attention to
both parts is

    n = log(exp(n_1) + exp(n_2)),    o = exp(n_1 - n) o_1 + exp(n_2 - n) o_2,

so no key or value of the prefix is repeated for its rows. In the backward pass the weights of attention to
both are p = exp(scores - n), whichever part a key is in, and the gradient of its score is
p (g . v - g . o): each part's gradient needs n and o of the whole, and nothing of the other part. (Sharing
prefixes in training: Prefix Grouper, arXiv 2506.05433; merging by log-sum-exp and this backward pass are our
reading.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.kv_cache.row_groups import RowGroups

MAX_SCORES = 1 << 25  # scores that exist at once where torch has no fused kernel


@dataclass(frozen=True, eq=False)
class Merge:
    """How `N` rows attend to both parts. Masks are added to scores: `prefix` (P, 1, 1 or t, S), `own` (t, T).

    Without `own` attention to own tokens is causal, and full where there is one query only.
    """

    groups: RowGroups
    scaling: float
    prefix: Tensor | None = None
    own: Tensor | None = None


def attend_merged(
    query: Tensor, prefix: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], merge: Merge
) -> Tensor:
    """Attend from (N, H, t, D) to the prefixes' keys and values (P, h, S, D) and to the rows' (N, h, T, D).

    Returns (N, H, t, D).
    """
    exact = query.dtype in (torch.float32, torch.float64)
    if query.shape[2] == 1 and exact and not torch.is_grad_enabled():
        return _attend_one_token(query, prefix, own, merge)
    return _MergedAttention.apply(query, *prefix, *own, merge)


def _attend_one_token(
    query: Tensor, prefix: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], merge: Merge
) -> Tensor:
    """Attend from one token of every row, with the scores of both parts in one softmax."""
    groups, length = merge.groups, prefix[0].shape[2]
    asked = (query * merge.scaling).reshape(len(query), prefix[0].shape[1], -1, query.shape[-1])
    scores = groups.fold(asked) @ prefix[0].transpose(-1, -2)
    scores = groups.unfold(scores if merge.prefix is None else scores.add_(merge.prefix))
    own_scores = asked @ own[0].transpose(-1, -2)
    own_scores = own_scores if merge.own is None else own_scores.add_(merge.own)
    weights = torch.cat([scores, own_scores], -1).softmax(-1)
    out = groups.unfold(groups.fold(weights[..., :length]) @ prefix[1])
    out += weights[..., length:] @ own[1]
    return out.flatten(1, 2)[:, :, None]


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor,
        merge: Merge,
    ) -> Tensor:  # fmt: skip
        parts = _parts(query, keys, own_keys, merge)
        (out, norm), (own_out, own_norm) = (
            _attend(part.fold(query), *part.expand(*pair), part.mask, part.causal, merge.scaling)
            for part, pair in zip(parts, ((keys, values), (own_keys, own_values)), strict=True)
        )
        norm, own_norm = parts[0].unfold(norm), parts[1].unfold(own_norm)
        total = torch.logaddexp(norm, own_norm)
        out = parts[0].unfold(out) * (norm - total).exp()[..., None]
        out = (out + parts[1].unfold(own_out) * (own_norm - total).exp()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, out, total)
        ctx.merge = merge
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, out, total = ctx.saved_tensors
        results = []
        parts = _parts(query, keys, own_keys, ctx.merge)
        for part, pair in zip(parts, ((keys, values), (own_keys, own_values)), strict=True):
            inputs = (part.fold(x) for x in (grad, query, out, total))
            d_query, *d_pair = _attend_backward(
                *inputs, *part.expand(*pair), part.mask, part.causal, ctx.merge.scaling
            )
            results.append((part.unfold(d_query), *part.reduce(*d_pair)))
        (d_query, *d_prefix), (d_own_query, *d_own) = results
        return d_query + d_own_query, *d_prefix, *d_own, None


@dataclass(frozen=True, eq=False)
class _PrefixPart:
    """Rows of one prompt and query heads of one key head are queries of one product."""

    groups: RowGroups
    heads: int
    num: int
    mask: Tensor | None
    causal = False

    def fold(self, x: Tensor) -> Tensor:
        return self.groups.fold(x.unflatten(1, (self.heads, -1)).flatten(2, 3))

    def unfold(self, x: Tensor) -> Tensor:
        return self.groups.unfold(x).unflatten(2, (-1, self.num)).flatten(1, 2)

    def expand(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    def reduce(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


@dataclass(frozen=True, eq=False)
class _OwnPart:
    """Rows' own tokens. With one new token the query heads of a key head are queries of one product.

    With several, each query head gets a view of its key head, which repeats no memory, so that the causal
    mask of the kernel applies.
    """

    rows: int
    heads: int
    num: int
    times: int  # query heads of a key head
    mask: Tensor | None
    causal: bool

    def fold(self, x: Tensor) -> Tensor:
        shape = (1, self.times) if self.num == 1 else (self.times, self.num)
        return x.reshape(self.rows * self.heads, *shape, *x.shape[3:])

    def unfold(self, x: Tensor) -> Tensor:
        return x.reshape(self.rows, self.heads * self.times, self.num, *x.shape[3:])

    def expand(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        times = 1 if self.num == 1 else self.times
        return tuple(x.flatten(0, 1)[:, None].expand(-1, times, -1, -1) for x in (keys, values))

    def reduce(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x.sum(1).unflatten(0, (self.rows, self.heads)) for x in (keys, values))


def _parts(query: Tensor, keys: Tensor, own_keys: Tensor, merge: Merge) -> tuple[_PrefixPart, _OwnPart]:
    rows, _, num, _ = query.shape
    heads = keys.shape[1]
    times, length = query.shape[1] // heads, own_keys.shape[2]
    mask, own = merge.prefix, merge.own
    if mask is not None and mask.shape[2] > 1:
        mask = merge.groups.tile(mask, times)
    causal = own is None and num > 1
    if causal and length != num:
        # The kernel's own causal mask aligns the first query with the first key; here the last ones meet.
        own, causal = causal_mask(num, length, query), False
    return (
        _PrefixPart(merge.groups, heads, num, mask),
        _OwnPart(rows, heads, num, times, None if own is None else own[None, None], causal),
    )


def causal_mask(num: int, length: int, like: Tensor, window: int = 0) -> Tensor:
    """Make the causal mask of the `num` newest of `length` tokens, added to scores: (num, length).

    With a `window` a token sees at most so many tokens, itself included; 0 means all.
    """
    newest = torch.arange(length - num, length, device=like.device)[:, None]
    ago = newest - torch.arange(length, device=like.device)
    hidden = (ago < 0) | (ago >= window) if window else ago < 0
    return additive_mask(hidden, like)


def additive_mask(hidden: Tensor, like: Tensor) -> Tensor:
    """Turn a bool mask of hidden keys into what is added to scores.

    The value is finite, so that a row that sees no key of one part gives it weight 0 and not NaN.
    """
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, torch.finfo(like.dtype).min
    )


# ---- attention to one part


def _has_kernel(query: Tensor, values: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == values.shape[-1]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend to one part: the output (B, h, Q, D), and the log-sum-exp of the scores (B, h, Q)."""
    if _has_kernel(query, values):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, 0.0, causal, attn_mask=mask, scale=scaling)
    wide = torch.promote_types(query.dtype, torch.float32)
    pieces = []
    for rows in _pieces(query, keys):
        scores = _scores(query[:, :, rows], keys, mask, causal, rows, scaling, wide)
        norm = scores.logsumexp(-1)
        weights = (scores - norm[..., None]).exp().to(values.dtype)
        pieces.append(((weights @ values).to(query.dtype), norm))
    return tuple(torch.cat(x, 2) for x in zip(*pieces, strict=True))


def _attend_backward(
    grad: Tensor, query: Tensor, out: Tensor, norm: Tensor, keys: Tensor, values: Tensor,
    mask: Tensor | None, causal: bool, scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of queries, keys and values of one part.

    `out` and `norm` are the output and the log-sum-exp of attention to both parts.
    """
    if _has_kernel(query, values):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(
            grad, query, keys, values, out, norm, 0.0, causal, attn_mask=mask, scale=scaling
        )  # fmt: skip
    wide = norm.dtype
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)  # g . o
    d_query, d_keys, d_values = [], keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    for rows in _pieces(query, keys):
        scores = _scores(query[:, :, rows], keys, mask, causal, rows, scaling, wide)
        weights = (scores - norm[:, :, rows, None]).exp()
        d_values += weights.to(grad.dtype).transpose(-1, -2) @ grad[:, :, rows]
        # d score = p (g . v - g . o), see the top of this file
        d_scores = (grad[:, :, rows] @ values.transpose(-1, -2)).to(wide) - delta[:, :, rows]
        d_scores = (weights * d_scores * scaling).to(query.dtype)
        d_query.append(d_scores @ keys)
        d_keys += d_scores.transpose(-1, -2) @ query[:, :, rows]
    return torch.cat(d_query, 2), d_keys, d_values


def _pieces(query: Tensor, keys: Tensor) -> list[slice]:
    """Split queries so that the scores of a piece fit."""
    num = query.shape[2]
    size = max(1, MAX_SCORES // max(1, query.shape[0] * query.shape[1] * keys.shape[2]))
    return [slice(start, min(num, start + size)) for start in range(0, num, size)]


def _scores(
    query: Tensor, keys: Tensor, mask: Tensor | None, causal: bool, rows: slice, scaling: float,
    wide: torch.dtype,
) -> Tensor:  # fmt: skip
    scores = (query @ keys.transpose(-1, -2)).to(wide) * scaling
    if causal:
        key = torch.arange(keys.shape[2], device=query.device)
        asking = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
        scores = scores.masked_fill(key > asking, torch.finfo(wide).min)
    if mask is None:
        return scores
    return scores + (mask if mask.shape[-2] == 1 else mask[..., rows, :])
