"""Blocks of stored keys or values, exact or quantised, with the two matrix products of attention.

A block stores `R` rows, `h` key-value heads, `n` tokens and `D` channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mmrl.kv_cache.packed_matmul import dots, mix, times
from mmrl.kv_cache.quantization import Codes, dequantize, rotate


class Block(Protocol):
    """Stored keys or values that can be multiplied with queries and with attention weights."""

    nbytes: int  # memory of all tensors

    def dots(self, query: Tensor) -> Tensor: ...  # scores of queries (rows, heads, Q, channels)
    def mix(self, weights: Tensor) -> Tensor: ...  # sums of values for weights (rows, heads, Q, n)
    def dense(self) -> Tensor: ...  # dequantised tokens (rows, heads, n, channels)
    def select(self, rows: Tensor) -> Block: ...  # select rows by index


@dataclass(frozen=True)
class ExactBlock:
    """Unquantised tokens (rows, heads, tokens, channels), in the precision of the model."""

    x: Tensor

    @property
    def nbytes(self) -> int:
        return self.x.nbytes

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor]:
        """Return the tokens with rows and heads flattened to one axis, (R * h, n, D), and transposed."""
        flat = self.x.flatten(0, 1)
        return flat, flat.mT

    def dots(self, query: Tensor) -> Tensor:
        return self._times(query, self._flat[1])

    def mix(self, weights: Tensor) -> Tensor:
        return self._times(weights, self._flat[0])

    def _times(self, x: Tensor, other: Tensor) -> Tensor:
        product = times(x.flatten(0, 1).to(other.dtype), other)
        return product.view(*x.shape[:3], -1).to(x.dtype)

    def dense(self) -> Tensor:
        return self.x

    def select(self, rows: Tensor) -> ExactBlock:
        return ExactBlock(self.x[rows])


@dataclass(frozen=True)
class CodedBlock:
    """Quantised tokens (rows R, heads h, groups E, n / E, channels D); `rotated`: channels were rotated.

    Codes are multiplied without dequantising them (post-scaling, CalibQuant, arXiv 2502.14882). With one
    scale per channel, a token x = low + scale * code has the products

        q . x = (q * scale) . code + q . low,    sum_n w_n x_n = scale * sum_n w_n code_n + low * sum_n w_n,

    and with one scale per token sum_n w_n x_n = sum_n (w_n scale_n) code_n + sum_n w_n low_n.
    """

    codes: Codes
    rotated: bool = False

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return codes, scale, low and transposed low, with rows, heads and groups in one axis."""
        packed, scale, low = (x.flatten(0, 2) for x in self.codes.tensors.values())
        return packed, scale, low, low.mT

    def dots(self, query: Tensor) -> Tensor:
        # Requires one scale per channel. Queries are multiplied by the scales, separately for each group.
        groups = self.codes.packed.shape[2]
        packed, scale, _, low = self._flat
        each = self._rotate(query).flatten(0, 1)
        each = each.repeat_interleave(groups, 0) if groups > 1 else each
        base = torch.bmm(each, low.to(each.dtype))  # q . low: one number per query and group
        scores = dots(each * scale, packed, self.codes.nbits, base)
        if groups == 1:
            return scores.view(*query.shape[:3], -1)
        # from (rows * heads * groups, Q, n) to (rows, heads, Q, groups * n)
        return scores.view(*query.shape[:2], groups, *scores.shape[1:]).transpose(2, 3).flatten(-2)

    def mix(self, weights: Tensor) -> Tensor:
        if self.codes.by_token:
            return self._rotate(self._mix_by_token(weights))
        groups, shape = self.codes.packed.shape[2], weights.shape[:3]
        packed, scale, low, _ = self._flat
        if groups > 1:
            weights = weights.unflatten(-1, (groups, -1)).transpose(2, 3).flatten(0, 1)
        weights = weights.flatten(0, 1)
        flat = mix(weights, packed, self.codes.nbits, self.codes.size)
        out = torch.addcmul(flat * scale, weights.sum(-1, keepdim=True), low.to(flat.dtype))
        out = out.view(*shape, -1) if groups == 1 else out.view(*shape[:2], groups, *out.shape[1:]).sum(2)
        return self._rotate(out)

    def _mix_by_token(self, weights: Tensor) -> Tensor:
        # A token has a scale for each of `kinds` groups of channels. Attention weights are multiplied by
        # these scales, so every group of channels needs a separate product: blocks are (R, h, E, kinds).
        codes, kinds = self.codes, self.codes.scale.shape[-1]
        weights = weights.unflatten(-1, (codes.packed.shape[2], -1)).transpose(2, 3)
        scale, low = (x.to(weights.dtype).movedim(-1, 3) for x in (codes.scale, codes.low))
        folded = weights[:, :, :, None] * scale[..., None, :]
        packed = codes.packed.unflatten(-1, (kinds, -1)).movedim(-2, 3)
        flat = mix(folded.flatten(0, 3), packed.flatten(0, 3), codes.nbits, codes.size // kinds)
        base = (weights[:, :, :, None] * low[..., None, :]).sum(-1, keepdim=True)
        out = flat.view(*folded.shape[:-1], -1) + base
        return out.sum(2).movedim(2, 3).flatten(-2)

    def dense(self) -> Tensor:
        return self._rotate(dequantize(self.codes)).flatten(2, 3)

    def select(self, rows: Tensor) -> CodedBlock:
        return replace(self, codes=self.codes.map(lambda x: x[rows]))

    def _rotate(self, x: Tensor) -> Tensor:
        return rotate(x) if self.rotated else x


def per_head(slots: Tensor) -> Tensor:
    """Add a head axis to slots (rows, tokens); return slots (rows, heads, tokens) unchanged."""
    return slots if slots.dim() == 3 else slots[:, None]


def spread(x: Tensor, slots: Tensor, length: int) -> Tensor:
    """Scatter tokens (rows, heads, n, channels) to `length` slots; empty slots are 0.

    `slots` (rows, n) or (rows, heads, n) are the target indices; tokens with a slot below 0 are dropped.
    """
    slots = per_head(slots).expand(x.shape[:3])
    # Dropped tokens go to an additional slot at the end, which is cut off.
    out = x.new_zeros(*x.shape[:2], length + 1, x.shape[3])
    index = torch.where(slots < 0, length, slots)[..., None].expand(x.shape)
    return out.scatter_(2, index, x)[:, :, :length]


def collect(x: Tensor, slots: Tensor) -> Tensor:
    """Gather the tokens at `slots` from `x` (rows, heads, tokens, channels); slots below 0 give zeros."""
    slots = per_head(slots).expand(*x.shape[:2], slots.shape[-1])
    tokens = x.gather(2, slots.clamp(min=0)[..., None].expand(*slots.shape, x.shape[-1]))
    return tokens * (slots >= 0)[..., None]
