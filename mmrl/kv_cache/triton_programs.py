"""Triton kernels of products with packed codes; imported only where Triton is installed."""

from __future__ import annotations

import importlib

triton = importlib.import_module("triton")
tl = importlib.import_module("triton.language")


@triton.jit
def numbers(packed, block, token, channel, tokens, size, width, NBITS: tl.constexpr):
    """Load the codes of `token` (t,) and `channel` (c,) of a block, as float32 (t, c)."""
    each: tl.constexpr = 8 // NBITS
    at = (block * tokens + token)[:, None] * width + (channel // each)[None, :]
    inside = (token < tokens)[:, None] & (channel < size)[None, :]
    byte = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    shift = NBITS * (each - 1 - channel % each)
    return ((byte >> shift[None, :]) & ((1 << NBITS) - 1)).to(tl.float32)


@triton.jit
def dots_program(
    query, packed, out, num, tokens, size, width,
    NBITS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Multiply some queries of one block with some tokens."""
    block = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, SIZE)
    asked = tl.load(
        query + (block * num + row)[:, None] * size + channel[None, :],
        mask=(row < num)[:, None] & (channel < size)[None, :],
        other=0.0,
    ).to(tl.float32)
    codes = numbers(packed, block, token, channel, tokens, size, width, NBITS)
    # tf32 would round the queries, into which scales are folded, to 10 bits.
    scores = tl.dot(asked, tl.trans(codes), input_precision="ieee")
    inside = (row < num)[:, None] & (token < tokens)[None, :]
    tl.store(out + (block * num + row)[:, None] * tokens + token[None, :], scores, mask=inside)


@triton.jit
def mix_program(
    weights, packed, out, num, tokens, size, width,
    NBITS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Sum a range of the tokens of one block by the weights of some queries."""
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
        total += tl.dot(weight, codes, input_precision="ieee")
    place = (part * tl.num_programs(0) + block) * num
    at = (place + row)[:, None] * size + channel[None, :]
    tl.store(out + at, total, mask=(row < num)[:, None] & (channel < size)[None, :])
