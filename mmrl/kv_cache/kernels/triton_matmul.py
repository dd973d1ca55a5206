"""The products of `held/products.py` in Triton: bytes are read once and unpacked in registers.

Checked in Triton's interpreter; no GPU has run them.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 128  # of one program of `dots`, and of one step of `mix`
LEAST = 16  # the least number of rows that a product of tensor cores takes
SPLIT = 2048  # tokens of one program of `mix`; their sums are added behind it


def dots(query: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Multiply queries (M, Q, D) with codes (M, n, bytes): (M, Q, n) float32."""
    import triton

    blocks, num, size = query.shape
    tokens = packed.shape[1]
    query, packed = query.contiguous(), packed.contiguous()
    out = torch.empty(blocks, num, tokens, dtype=torch.float32, device=query.device)
    grid = (blocks, triton.cdiv(tokens, TOKENS), triton.cdiv(num, LEAST))
    _kernels()[0][grid](
        query, packed, out, num, tokens, size, packed.shape[2],
        NBITS=nbits, SIZE=triton.next_power_of_2(size), TOKENS=TOKENS, QUERIES=LEAST,
    )  # fmt: skip
    return out


def mix(weights: Tensor, packed: Tensor, nbits: int, size: int) -> Tensor:
    """Add up codes (M, n, bytes) by weights (M, Q, n): (M, Q, D) float32."""
    import triton

    blocks, num, tokens = weights.shape
    weights, packed = weights.contiguous(), packed.contiguous()
    parts = triton.cdiv(tokens, SPLIT)
    out = torch.empty(parts, blocks, num, size, dtype=torch.float32, device=weights.device)
    grid = (blocks, parts, triton.cdiv(num, LEAST))
    _kernels()[1][grid](
        weights, packed, out, num, tokens, size, packed.shape[2],
        NBITS=nbits, SIZE=triton.next_power_of_2(size), TOKENS=TOKENS, QUERIES=LEAST, SPLIT=SPLIT,
    )  # fmt: skip
    return out.sum(0)


def _kernels() -> tuple:
    # Triton reads whether it interprets when a kernel is made, so they stand in a module of their own.
    from mmrl.kv_cache.kernels.triton_programs import dots_program, mix_program

    return dots_program, mix_program
