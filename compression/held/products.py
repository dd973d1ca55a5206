"""Products of queries and attention weights with packed codes: what the fused path is made of.

`M` blocks of `n` tokens with `D` channels each; scales are folded into the other factor by whoever calls.
Where a CPU multiplies matrices of bytes and queries are few, codes of up to two bits stay whole numbers, and
float32 queries and weights become three digits of a byte each: exact, but for what is a two-millionth of the
largest number or less.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from mmrl.compression.bits import table

HELD = 1 << 17  # numbers written out at once: they stay in the processor's second-level cache
WORTH = 256  # tokens that make a call for every block worth its while
FEW = 12  # queries of a block up to which products of bytes are faster than those of floats
DIGITS, BASE = 3, 128  # a float32 as bytes from -127 to 127
TINY = 1e-30  # the largest of numbers that are all 0
SUMMED = 1 << 22  # products of bytes that a sum in 32 bits holds
NARROW = 4  # queries that a look-up serves at once at least; fewer are padded, because one alone is slow
LARGEST = 1 << 20  # numbers in tables


def dots(query: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Multiply queries (M, Q, D) with codes (M, n, bytes): (M, Q, n)."""
    if packed.is_cuda:
        from mmrl.compression.kernels import triton_products

        return triton_products.dots(query, packed, nbits)
    if nbits <= 2 and packed.shape[1] >= WORTH:
        return (_whole_dots if _whole(query) else _looked_up)(query, packed, nbits)
    out = query.new_empty(*query.shape[:2], packed.shape[1])
    for (rows, tokens), numbers in _written(packed, nbits, query.shape[-1], query.dtype):
        out[rows, :, tokens] = query[rows] @ numbers.transpose(1, 2)
    return out


def mix(weights: Tensor, packed: Tensor, nbits: int, size: int) -> Tensor:
    """Add up codes (M, n, bytes) by weights (M, Q, n): (M, Q, D)."""
    if packed.is_cuda:
        from mmrl.compression.kernels import triton_products

        return triton_products.mix(weights, packed, nbits, size)
    if nbits <= 2 and WORTH <= packed.shape[1] <= SUMMED and _whole(weights):
        return _whole_mix(weights, packed, nbits)[..., :size]
    out = weights.new_zeros(*weights.shape[:2], size)
    for (rows, tokens), numbers in _written(packed, nbits, size, weights.dtype):
        out[rows].baddbmm_(weights[rows, :, tokens], numbers)
    return out


def _whole(x: Tensor) -> bool:
    return x.shape[1] <= FEW and x.dtype == torch.float32 and multiplies_bytes()


@cache
def multiplies_bytes() -> bool:
    """Tell whether this processor multiplies matrices of bytes, fast and exactly."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    x, y = torch.full((1, 64), -127, dtype=torch.int8), torch.full((64, 16), 3, dtype=torch.int8)
    try:
        found = torch._int_mm(x, y)
    except (AttributeError, RuntimeError):
        return False
    return bool((found == -64 * 127 * 3).all())


def _whole_dots(query: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Multiply as whole numbers."""
    (blocks, num, size), tokens = query.shape, packed.shape[1]
    digits, worth = _digits(nn.functional.pad(query, (0, packed.shape[2] * (8 // nbits) - size)))
    found = torch.empty(blocks, DIGITS * num, tokens, dtype=torch.int32)
    bytewise = Bytes(nbits, packed[0].numel(), packed.device)
    for each, block, out in zip(digits, packed, found, strict=True):
        torch._int_mm(each, bytewise.write(block).T, out=out)
    return _number(found, worth)


def _whole_mix(weights: Tensor, packed: Tensor, nbits: int) -> Tensor:
    """Add up as whole numbers."""
    blocks, num, _ = weights.shape
    # Half of the last digit's unit: cutting off rounds then, and weights do not shrink together.
    digits, worth = _digits(weights, 0.5 * BASE ** (1 - DIGITS))
    found = torch.empty(blocks, DIGITS * num, packed.shape[2] * (8 // nbits), dtype=torch.int32)
    bytewise = Bytes(nbits, packed[0].numel(), packed.device)
    for each, block, out in zip(digits, packed, found, strict=True):
        torch._int_mm(each, bytewise.write(block), out=out)
    return _number(found, worth)


def _digits(x: Tensor, more: float = 0.0) -> tuple[Tensor, Tensor]:
    """Write numbers (M, Q, k) as bytes (M, 3 Q, k), digits to the base of 128, and what the first digit is
    worth: (M, Q, 1). `more` is added to all, in units of the first digit."""
    worth = x.abs().amax(-1, keepdim=True).clamp_(min=TINY).div_(BASE - 1)
    rest = (x / worth).add_(more)
    out = torch.empty(len(x), DIGITS, *x.shape[1:], dtype=torch.int8)
    for i, digit in enumerate(out.unbind(1)):
        digit.copy_(rest if i == 0 else rest.frac_().mul_(BASE))  # cuts off what is behind the point
    return out.flatten(1, 2), worth


def _number(found: Tensor, worth: Tensor) -> Tensor:
    """Put products of digits (M, 3 Q, k) together."""
    first, *others = found.to(worth.dtype).unflatten(1, (DIGITS, -1)).unbind(1)
    for i, digit in enumerate(others, 1):
        first.add_(digit, alpha=BASE**-i)
    return first.mul_(worth)


class Bytes:
    """Writes codes of up to four bits out, a byte each, always into the same memory: fresh memory costs more
    than the work."""

    def __init__(self, nbits: int, most: int, device: torch.device) -> None:
        self.kinds = _byte_table(nbits, device)
        self.index = torch.empty(most, dtype=torch.int32, device=device)
        self.held = self.kinds.new_empty(most)

    def write(self, packed: Tensor) -> Tensor:
        """Write (..., bytes) to (..., codes)."""
        num = packed.numel()
        index, held = self.index[:num], self.held[:num]
        index.view(packed.shape).copy_(packed)
        torch.index_select(self.kinds, 0, index, out=held)
        return held.view(torch.int8).view(*packed.shape[:-1], -1)


@cache
def _byte_table(nbits: int, device: torch.device) -> Tensor:
    """List the codes of every byte as bytes, all of them in one number: (256,)."""
    kinds = {1: torch.int64, 2: torch.int32, 4: torch.int16}
    return table(nbits, torch.int8, device).contiguous().view(kinds[nbits]).flatten()


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


def _written(
    packed: Tensor, nbits: int, size: int, dtype: torch.dtype
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Write codes out piece by piece: yields (which blocks, which tokens) and numbers (m, t, D), which the
    next piece overwrites."""
    (blocks, tokens, width), each = packed.shape, 8 // nbits
    length = max(1, min(tokens, HELD // size))
    many = max(1, min(blocks, HELD // (size * length)))
    numbers = torch.empty(many * length * width * each, dtype=dtype, device=packed.device)
    bytewise = None if nbits == 8 else Bytes(nbits, many * length * width, packed.device)
    for a in range(0, blocks, many):
        for b in range(0, tokens, length):
            part = slice(a, a + many), slice(b, b + length)
            codes = packed[part] if bytewise is None else bytewise.write(packed[part])
            yield part, numbers[: codes.numel()].view(codes.shape).copy_(codes)[..., :size]
