"""Triton kernels for the products of `packed_matmul`, which unpack bytes in registers.

Imported only for tensors on a GPU. Tests run the kernels in Triton's interpreter, and `python -m
benchmarks.gpu` runs them on a GPU.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

# Triton reads TRITON_INTERPRET when a kernel is defined, so it must be set before this import.
triton = importlib.import_module("triton")
tl = importlib.import_module("triton.language")

TOKENS = 128  # tokens per program of `dots`, and per step of `mix`
MIN_ROWS = 16  # fewest rows and channels of a tensor-core product
DOT = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16  # the interpreter has no bfloat16
SPLIT = 2048  # tokens per program of `mix`; the sums of all programs are added afterwards


def dots(query: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Multiply queries (blocks, Q, channels) with packed codes (blocks, n, bytes): (blocks, Q, n) float32."""
    blocks, num, size = query.shape
    tokens = packed.shape[1]
    query, packed = query.contiguous(), packed.contiguous()
    out = torch.empty(blocks, num, tokens, dtype=torch.float32, device=query.device)
    grid = (blocks, triton.cdiv(tokens, TOKENS), triton.cdiv(num, MIN_ROWS))
    dots_program[grid](
        query, packed, out, num, tokens, size, packed.shape[2],
        NBITS=nbits, SIZE=padded(size), TOKENS=TOKENS, QUERIES=MIN_ROWS, DOT=DOT,
    )  # fmt: skip
    return out


def mix(weights: Tensor, packed: Tensor, nbits: int, size: int) -> Tensor:
    """Sum packed codes (blocks, n, bytes) with weights (blocks, Q, n): (blocks, Q, channels) float32."""
    blocks, num, tokens = weights.shape
    weights, packed = weights.contiguous(), packed.contiguous()
    parts = triton.cdiv(tokens, SPLIT)
    out = torch.empty(parts, blocks, num, size, dtype=torch.float32, device=weights.device)
    grid = (blocks, parts, triton.cdiv(num, MIN_ROWS))
    mix_program[grid](
        weights, packed, out, num, tokens, size, packed.shape[2],
        NBITS=nbits, SIZE=padded(size), TOKENS=TOKENS, QUERIES=MIN_ROWS, SPLIT=SPLIT, DOT=DOT,
    )  # fmt: skip
    return out.sum(0)


def padded(size: int) -> int:
    """Round the number of channels up to a size that tensor cores support."""
    return max(MIN_ROWS, triton.next_power_of_2(size))


@triton.jit
def numbers(packed, block, token, channel, tokens, size, width, NBITS: tl.constexpr):
    """Load the codes of the given tokens (t,) and channels (c,) of a block, as float32 (t, c)."""
    each: tl.constexpr = 8 // NBITS
    at = (block * tokens + token)[:, None] * width + (channel // each)[None, :]
    inside = (token < tokens)[:, None] & (channel < size)[None, :]
    byte = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    shift = NBITS * (each - 1 - channel % each)
    return ((byte >> shift[None, :]) & ((1 << NBITS) - 1)).to(tl.float32)


@triton.jit
def exact_dot(x, codes, DOT: tl.constexpr):
    """Multiply float32 (m, k) with codes (k, n) on bfloat16 tensor cores, as exactly as in float32.

    The 24 bits of a float32 number are split into three bfloat16 numbers of 8 bits; a code fits into one.
    """
    codes = codes.to(DOT)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    small = tl.dot(low.to(DOT), codes) + tl.dot(middle.to(DOT), codes)
    return small + tl.dot(high.to(DOT), codes)


@triton.jit
def dots_program(
    query, packed, out, num, tokens, size, width,
    NBITS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Kernel: multiply `QUERIES` queries of one block with `TOKENS` tokens."""
    block = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, SIZE)
    queries = tl.load(
        query + (block * num + row)[:, None] * size + channel[None, :],
        mask=(row < num)[:, None] & (channel < size)[None, :],
        other=0.0,
    ).to(tl.float32)
    codes = numbers(packed, block, token, channel, tokens, size, width, NBITS)
    scores = exact_dot(queries, tl.trans(codes), DOT)
    inside = (row < num)[:, None] & (token < tokens)[None, :]
    tl.store(out + (block * num + row)[:, None] * tokens + token[None, :], scores, mask=inside)


@triton.jit
def mix_program(
    weights, packed, out, num, tokens, size, width,
    NBITS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Kernel: sum `SPLIT` tokens of one block, weighted for `QUERIES` queries."""
    block = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, SIZE)
    total = tl.zeros((QUERIES, SIZE), dtype=tl.float32)
    for start in range(0, SPLIT, TOKENS):
        token = part * SPLIT + start + tl.arange(0, TOKENS)
        weight = tl.load(
            weights + (block * num + row)[:, None] * tokens + token[None, :],
            mask=(row < num)[:, None] & (token < tokens)[None, :],
            other=0.0,
        ).to(tl.float32)
        codes = numbers(packed, block, token, channel, tokens, size, width, NBITS)
        total += exact_dot(weight, codes, DOT)
    place = (part * tl.num_programs(0) + block) * num
    at = (place + row)[:, None] * size + channel[None, :]
    tl.store(out + at, total, mask=(row < num)[:, None] & (channel < size)[None, :])
