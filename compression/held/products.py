"""Products of queries and attention weights with packed codes: what the fused path is made of.

`M` blocks of `n` tokens with `D` channels each; scales are folded into the other factor by whoever calls.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mmrl.compression.bits import table

HELD = 1 << 17  # numbers written out at once: they stay in the processor's second-level cache
WORTH = 256  # tokens that make tables of all bytes worth their while
NARROW = 4  # queries that a look-up serves at once at least; fewer are padded, because one alone is slow
LARGEST = 1 << 20  # numbers in tables


def dots(query: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Multiply queries (M, Q, D) with codes (M, n, bytes): (M, Q, n)."""
    if packed.is_cuda:
        from mmrl.compression.kernels import triton_products

        return triton_products.dots(query, packed, nbits)
    if nbits <= 2 and packed.shape[1] >= WORTH:
        return _looked_up(query, packed, nbits)
    out = query.new_empty(*query.shape[:2], packed.shape[1])
    for (rows, tokens), numbers in _written(packed, nbits, query.shape[-1], query.dtype):
        out[rows, :, tokens] = query[rows] @ numbers.transpose(1, 2)
    return out


def mix(weights: Tensor, packed: Tensor, nbits: int, size: int) -> Tensor:
    """Add up codes (M, n, bytes) by weights (M, Q, n): (M, Q, D)."""
    if packed.is_cuda:
        from mmrl.compression.kernels import triton_products

        return triton_products.mix(weights, packed, nbits, size)
    if nbits <= 2 and weights.shape[1] == 1 and packed.shape[1] >= WORTH:
        return _summed(weights, packed, nbits)[..., :size]
    out = weights.new_zeros(*weights.shape[:2], size)
    for (rows, tokens), numbers in _written(packed, nbits, size, weights.dtype):
        out[rows].baddbmm_(weights[rows, :, tokens], numbers)
    return out


def _looked_up(query: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Multiply through tables: what a byte adds to a score is one of 256 numbers, so a byte costs one
    look-up."""
    (blocks, num, size), width, each = query.shape, packed.shape[2], 8 // nbits
    wide = max(num, NARROW)
    query = nn.functional.pad(query, (0, width * each - size, 0, wide - num))
    kinds = table(nbits, query.dtype, query.device)
    out = query.new_empty(blocks, num, packed.shape[1])
    many = max(1, LARGEST // (width * 256 * wide))
    first = torch.arange(width, dtype=torch.int32) * 256
    for a in range(0, blocks, many):
        part, codes = query[a : a + many], packed[a : a + many].int()
        tables = kinds @ part.unflatten(-1, (width, each)).permute(0, 2, 3, 1)
        starts = torch.arange(len(part), dtype=torch.int32)[:, None, None] * (width * 256)
        found = nn.functional.embedding_bag(
            (codes + (first + starts)).flatten(0, 1), tables.reshape(-1, wide), mode="sum"
        )
        out[a : a + many] = found.view(len(part), -1, wide)[..., :num].transpose(1, 2)
    return out


def _summed(weights: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Add up codes for one query a block: bytes are looked up and weighed, and never written out."""
    blocks, tokens, width = packed.shape
    codes = packed.transpose(1, 2).int().reshape(-1, tokens)
    share = weights.expand(blocks, width, tokens).reshape(-1, tokens)
    kinds = table(nbits, weights.dtype, weights.device)
    found = nn.functional.embedding_bag(codes, kinds, per_sample_weights=share, mode="sum")
    return found.view(blocks, 1, -1)


def _written(
    packed: Tensor, nbits: int, size: int, dtype: torch.dtype
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Write codes out piece by piece: yields (which blocks, which tokens) and numbers (m, t, D)."""
    blocks, tokens = packed.shape[:2]
    length = max(1, min(tokens, HELD // size))
    many = max(1, HELD // (size * length))
    for a in range(0, blocks, many):
        for b in range(0, tokens, length):
            part = slice(a, a + many), slice(b, b + length)
            yield part, _numbers(packed[part], nbits, size, dtype)


def _numbers(packed: Tensor, nbits: int, size: int, dtype: torch.dtype) -> Tensor:
    """Write codes out: a conversion where a byte is a code, else one look-up a byte."""
    if nbits == 8:
        return packed.to(dtype)
    codes = table(nbits, dtype, packed.device)
    return nn.functional.embedding(packed.int(), codes).flatten(-2)[..., :size]
