"""Attention to two parts at once: what rows share, and what stands behind it row by row.

Softmax over both is each part's own softmax, weighed by the share of its normaliser, so no key or value of
the shared part is ever repeated. Backwards, every part meets the output and the normaliser of the whole:
with these a part's gradient is that of one attention to all (Prefix Grouper, arXiv 2506.05433; merging by
log-sum-exp, and its backward pass, are our reading).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SCORES = 1 << 25  # scores that may exist at once where there is no kernel


class Groups:
    """Which rows read which prompt. `owner` (N,) is the prompt of every row, out of `count`."""

    def __init__(self, owner: Tensor, count: int) -> None:
        self.owner, self.count = owner, count

    def select(self, rows: Tensor) -> tuple[Groups, Tensor]:
        """Keep rows, in this order; gives the prompts that are still read as well."""
        used, owner = torch.unique(self.owner[rows.to(self.owner.device)], return_inverse=True)
        return Groups(owner, len(used)), used

    @cached_property
    def _layout(self) -> tuple[Tensor, int, bool]:
        """Number the rows of every prompt; the largest group; whether groups are alike and in order."""
        same = self.owner[:, None] == self.owner
        place = same.tril(-1).sum(1)
        most = int(place.max()) + 1
        line = torch.arange(self.count, device=self.owner.device).repeat_interleave(most)
        return place, most, torch.equal(line, self.owner)

    def fold(self, x: Tensor) -> Tensor:
        """Bring rows of one prompt together: (N, h, Q, *) to (P, h, g * Q, *), g the largest group."""
        place, most, regular = self._layout
        if regular:
            out = x.unflatten(0, (self.count, most))
        else:
            out = x.new_zeros(self.count, most, *x.shape[1:])
            out[self.owner, place] = x
        return out.transpose(1, 2).flatten(2, 3)

    def unfold(self, x: Tensor) -> Tensor:
        """Give every row its own again: (P, h, g * Q, *) to (N, h, Q, *)."""
        place, most, regular = self._layout
        out = x.unflatten(2, (most, -1)).transpose(1, 2)
        return out.flatten(0, 1) if regular else out[self.owner, place]

    def tile(self, mask: Tensor, times: int) -> Tensor:
        """Repeat a mask over (P, 1, t, n) as `fold` repeats queries: every row, and `times` heads of each."""
        return mask.repeat(1, 1, self._layout[1] * times, 1)


@dataclass(frozen=True, eq=False)
class Sight:
    """How `N` rows see both parts. Masks are added to scores: `shared` (P, 1, 1 or t, S), `own` (t, T).

    Without `own` a token sees what stands before it, and everything where there is one query only.
    """

    groups: Groups
    scaling: float
    shared: Tensor | None = None
    own: Tensor | None = None


def attend_merged(
    query: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], sight: Sight
) -> Tensor:
    """Attend from (N, H, t, D) to shared keys and values (P, h, S, D) and to those of the rows (N, h, T, D):
    (N, H, t, D)."""
    exact = query.dtype in (torch.float32, torch.float64)
    if query.shape[2] == 1 and exact and not torch.is_grad_enabled():
        return _attend_once(query, shared, own, sight)
    return _Merged.apply(query, *shared, *own, sight)


def _attend_once(
    query: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], sight: Sight
) -> Tensor:
    """Attend from one token of every row, scores of both parts side by side: less work where there is
    little."""
    groups, length = sight.groups, shared[0].shape[2]
    asked = (query * sight.scaling).reshape(len(query), shared[0].shape[1], -1, query.shape[-1])
    front = groups.fold(asked) @ shared[0].transpose(-1, -2)
    front = groups.unfold(front if sight.shared is None else front.add_(sight.shared))
    behind = asked @ own[0].transpose(-1, -2)
    behind = behind if sight.own is None else behind.add_(sight.own)
    shares = torch.cat([front, behind], -1).softmax(-1)
    out = groups.unfold(groups.fold(shares[..., :length]) @ shared[1])
    out += shares[..., length:] @ own[1]
    return out.flatten(1, 2)[:, :, None]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        sight: Sight,
    ) -> Tensor:
        sides = _sides(query, keys, own_keys, sight)
        (out, norm), (own_out, own_norm) = (
            _attend(side.into(query), *side.pair(*pair), side.mask, side.causal, sight.scaling)
            for side, pair in zip(sides, ((keys, values), (own_keys, own_values)), strict=True)
        )
        norm, own_norm = sides[0].back(norm), sides[1].back(own_norm)
        whole = torch.logaddexp(norm, own_norm)
        out = sides[0].back(out) * (norm - whole).exp()[..., None]
        out = (out + sides[1].back(own_out) * (own_norm - whole).exp()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, keys, values, own_keys, own_values, out, whole)
        ctx.sight = sight
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, own_keys, own_values, out, whole = ctx.saved_tensors
        found = []
        sides = _sides(query, keys, own_keys, ctx.sight)
        for side, pair in zip(sides, ((keys, values), (own_keys, own_values)), strict=True):
            inputs = (side.into(x) for x in (grad, query, out, whole))
            for_query, *for_pair = _attend_back(
                *inputs, *side.pair(*pair), side.mask, side.causal, ctx.sight.scaling
            )
            found.append((side.back(for_query), *side.pair_back(*for_pair)))
        (first, *shared), (second, *own) = found
        return first + second, *shared, *own, None


@dataclass(frozen=True, eq=False)
class _Shared:
    """Rows and query heads that read one key are queries of one product."""

    groups: Groups
    heads: int
    num: int
    mask: Tensor | None
    causal = False

    def into(self, x: Tensor) -> Tensor:
        return self.groups.fold(x.unflatten(1, (self.heads, -1)).flatten(2, 3))

    def back(self, x: Tensor) -> Tensor:
        return self.groups.unfold(x).unflatten(2, (-1, self.num)).flatten(1, 2)

    def pair(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    def pair_back(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


@dataclass(frozen=True, eq=False)
class _Own:
    """Query heads that read one key are queries of one product for one new token; else they stand side by
    side, and the key is read by all without being repeated."""

    rows: int
    heads: int
    num: int
    times: int
    mask: Tensor | None
    causal: bool

    def into(self, x: Tensor) -> Tensor:
        side = (1, self.times) if self.num == 1 else (self.times, self.num)
        return x.reshape(self.rows * self.heads, *side, *x.shape[3:])

    def back(self, x: Tensor) -> Tensor:
        return x.reshape(self.rows, self.heads * self.times, self.num, *x.shape[3:])

    def pair(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        side = 1 if self.num == 1 else self.times
        return tuple(x.flatten(0, 1)[:, None].expand(-1, side, -1, -1) for x in (keys, values))

    def pair_back(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x.sum(1).unflatten(0, (self.rows, self.heads)) for x in (keys, values))


def _sides(query: Tensor, keys: Tensor, own_keys: Tensor, sight: Sight) -> tuple[_Shared, _Own]:
    rows, _, num, _ = query.shape
    heads = keys.shape[1]
    times, length = query.shape[1] // heads, own_keys.shape[2]
    mask, own = sight.shared, sight.own
    if mask is not None and mask.shape[2] > 1:
        mask = sight.groups.tile(mask, times)
    causal = own is None and num > 1
    if causal and length != num:
        own, causal = causal_mask(num, length, query), False
    return (
        _Shared(sight.groups, heads, num, mask),
        _Own(rows, heads, num, times, None if own is None else own[None, None], causal),
    )


def causal_mask(num: int, length: int, like: Tensor, window: int = 0) -> Tensor:
    """Let the `num` newest of `length` tokens see those before them, at most `window` with themselves (0:
    all): what is added to scores, (num, length)."""
    ago = torch.arange(length - num, length, device=like.device)[:, None] - torch.arange(
        length, device=like.device
    )
    hidden = (ago < 0) | (ago >= window) if window else ago < 0
    return added(hidden, like)


def added(hidden: Tensor, like: Tensor) -> Tensor:
    """Turn what is hidden into what is added to scores. It is finite, so that a row that sees nothing of one
    part has a normaliser of weight 0, and not one that is no number."""
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, torch.finfo(like.dtype).min
    )


# ---- one part


def _has_kernel(query: Tensor, values: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == values.shape[-1]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend to one part: (B, h, Q, D), and the logarithm of what the softmax divides by, (B, h, Q)."""
    if _has_kernel(query, values):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, 0.0, causal, attn_mask=mask, scale=scaling)
    wide = torch.promote_types(query.dtype, torch.float32)
    parts = []
    for rows in _pieces(query, keys):
        scores = _scores(query[:, :, rows], keys, _cut(mask, rows), causal, rows, scaling, wide)
        norm = scores.logsumexp(-1)
        shares = (scores - norm[..., None]).exp().to(values.dtype)
        parts.append(((shares @ values).to(query.dtype), norm))
    return tuple(torch.cat(x, 2) for x in zip(*parts, strict=True))


def _attend_back(
    grad: Tensor, query: Tensor, out: Tensor, norm: Tensor, keys: Tensor, values: Tensor,
    mask: Tensor | None, causal: bool, scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Give the gradients of queries, keys and values of one part, with the output and the normaliser of the
    whole."""
    if _has_kernel(query, values):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(
            grad, query, keys, values, out, norm, 0.0, causal, attn_mask=mask, scale=scaling
        )  # fmt: skip
    wide = norm.dtype
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    for_query, for_keys, for_values = [], keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    for rows in _pieces(query, keys):
        scores = _scores(query[:, :, rows], keys, _cut(mask, rows), causal, rows, scaling, wide)
        shares = (scores - norm[:, :, rows, None]).exp()
        for_values += shares.to(grad.dtype).transpose(-1, -2) @ grad[:, :, rows]
        slope = (grad[:, :, rows] @ values.transpose(-1, -2)).to(wide) - delta[:, :, rows]
        slope = (shares * slope * scaling).to(query.dtype)
        for_query.append(slope @ keys)
        for_keys += slope.transpose(-1, -2) @ query[:, :, rows]
    return torch.cat(for_query, 2), for_keys, for_values


def _pieces(query: Tensor, keys: Tensor) -> list[slice]:
    """Part queries so that the scores of a piece fit."""
    num = query.shape[2]
    size = max(1, SCORES // max(1, query.shape[0] * query.shape[1] * keys.shape[2]))
    return [slice(at, min(num, at + size)) for at in range(0, num, size)]


def _cut(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def _scores(
    query: Tensor, keys: Tensor, mask: Tensor | None, causal: bool, rows: slice, scaling: float,
    wide: torch.dtype,
) -> Tensor:  # fmt: skip
    scores = (query @ keys.transpose(-1, -2)).to(wide) * scaling
    if causal:
        behind = torch.arange(keys.shape[2], device=query.device)
        here = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
        scores = scores.masked_fill(behind > here, torch.finfo(wide).min)
    return scores if mask is None else scores + mask
