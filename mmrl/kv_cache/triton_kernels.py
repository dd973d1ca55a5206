"""The products of `packed_matmul` in Triton: packed bytes are read once and unpacked in registers.

Tested in Triton's interpreter only; no GPU has run them.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 128  # of a program of `dots`, and of a step of `mix`
MIN_ROWS = 16  # of a product of tensor cores
SPLIT = 2048  # tokens of a program of `mix`; the sums of all programs are added afterwards


def dots(query: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Multiply queries (M, Q, D) with codes (M, n, bytes): (M, Q, n) float32."""
    import triton

    blocks, num, size = query.shape
    tokens = packed.shape[1]
    query, packed = query.contiguous(), packed.contiguous()
    out = torch.empty(blocks, num, tokens, dtype=torch.float32, device=query.device)
    grid = (blocks, triton.cdiv(tokens, TOKENS), triton.cdiv(num, MIN_ROWS))
    _kernels()[0][grid](
        query, packed, out, num, tokens, size, packed.shape[2],
        NBITS=nbits, SIZE=triton.next_power_of_2(size), TOKENS=TOKENS, QUERIES=MIN_ROWS,
    )  # fmt: skip
    return out


def mix(weights: Tensor, packed: Tensor, nbits: int, size: int) -> Tensor:
    """Sum codes (M, n, bytes) by weights (M, Q, n): (M, Q, D) float32."""
    import triton

    blocks, num, tokens = weights.shape
    weights, packed = weights.contiguous(), packed.contiguous()
    parts = triton.cdiv(tokens, SPLIT)
    out = torch.empty(parts, blocks, num, size, dtype=torch.float32, device=weights.device)
    grid = (blocks, parts, triton.cdiv(num, MIN_ROWS))
    _kernels()[1][grid](
        weights, packed, out, num, tokens, size, packed.shape[2],
        NBITS=nbits, SIZE=triton.next_power_of_2(size), TOKENS=TOKENS, QUERIES=MIN_ROWS, SPLIT=SPLIT,
    )  # fmt: skip
    return out.sum(0)


def _kernels() -> tuple:
    # Triton decides when a kernel is defined whether to interpret it, so kernels have a module of their own.
    from mmrl.kv_cache.triton_programs import dots_program, mix_program

    return dots_program, mix_program
