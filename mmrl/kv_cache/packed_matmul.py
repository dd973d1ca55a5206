"""Matrix products of queries and attention weights with packed codes, for fused attention.

Codes come in blocks of tokens with channels; callers multiply queries or weights by the scales. On a CPU
codes are unpacked piece by piece, to floats or, for few float32 queries, to bytes for integer products. For
integer products the queries or weights x are written in fixed point with digits to base 256,

    x = unit * (d0 + 256 * d1 + 65536 * d2),    each d in -128..127,

so that three int8 products with int32 sums give x @ codes. The only error is the rounding of x, at most one
two-millionth of the maximum of its row. In a decode step of a small model a call of torch costs as much as
the arithmetic of thousands of numbers, so this file minimises the number of calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from mmrl.core import onednn

MAX_FLOATS = 1 << 18  # floats unpacked at once; with their codes they roughly fill an L2 cache
MAX_CODES = 1 << 22  # codes unpacked to bytes at once; more than a cache holds, to save calls
MIN_TOKENS = 256  # fewest tokens of a block for byte products, which take one call per block
MIN_ONEDNN = 1 << 16  # fewest elements of a block for one oneDNN call per block
MAX_QUERIES = 12  # most queries of a block for byte products; with more, float products are faster
DIGITS, BASE = 3, 256
MAX_UNITS = (1 << 23) - 0x8100  # fixed-point value of a row's maximum; its highest digit is at most 127
OFFSET = 0x8080  # makes the two lower digits signed, see `split_digits`
MIN_UNITS = 1 << 21  # fewest units for a row's maximum; below, use float products
TINY = 1e-36  # added to every fixed-point unit, to avoid division by 0


def dots(query: Tensor, packed: Tensor, nbits: int, base: Tensor | None = None) -> Tensor:
    """Multiply queries (blocks, Q, channels) with packed codes (blocks, n, bytes), and add `base`."""
    if packed.is_cuda:
        from mmrl.kv_cache import triton_kernels

        out = triton_kernels.dots(query, packed, nbits)
        return out if base is None else out.add_(base)
    channels = packed.shape[2] * (8 // nbits)  # including padding in the last byte
    if channels > query.shape[2]:
        query = nn.functional.pad(query, (0, channels - query.shape[2]))
    query = swap_channels(query, _places(nbits, packed.shape[2], packed.device)[0].itemsize, 8 // nbits)
    out = query.new_empty(*query.shape[:2], packed.shape[1])
    # A number is at most MAX_UNITS fixed-point units. Sums over channels of such numbers times codes must fit
    # into the 31 bits of a positive int32, so with many channels fewer units are allowed.
    top = channels * (2**nbits - 1)
    if fits_bytes(query, packed, nbits) and top * MIN_UNITS < 1 << 31:
        unit, digits = split_digits(query, min(MAX_UNITS, (1 << 31) // top - 1))
        for rows, codes in unpack_blocks(packed, nbits):
            out[rows] = multiply_digits(digits[rows], codes.mT, torch.int32)
        out.mul_(unit)
    else:
        for rows, tokens, numbers in unpack_numbers(packed, nbits, query.dtype):
            out[rows, :, tokens] = times(query[rows], numbers.mT)
    return out if base is None else out.add_(base)


def mix(weights: Tensor, packed: Tensor, nbits: int, size: int) -> Tensor:
    """Sum packed codes (blocks, n, bytes) with weights (blocks, Q, n): (blocks, Q, channels)."""
    if packed.is_cuda:
        from mmrl.kv_cache import triton_kernels

        return triton_kernels.mix(weights, packed, nbits, size)
    (blocks, num, tokens), width = weights.shape, packed.shape[2]
    # Per digit (at most 128), the sum over tokens of digit times code must fit into int32. The three sums
    # are added as floats, because their total may not fit.
    if fits_bytes(weights, packed, nbits) and tokens * (2**nbits - 1) << 7 < 1 << 31:
        unit, digits = split_digits(weights, MAX_UNITS)
        pieces = unpack_blocks(packed, nbits)
        out = torch.cat([multiply_digits(digits[rows], codes, torch.float32) for rows, codes in pieces])
        out.mul_(unit)
    else:
        out = weights.new_zeros(blocks, num, width * (8 // nbits))
        for rows, part, numbers in unpack_numbers(packed, nbits, weights.dtype):
            out[rows] += times(weights[rows, :, part], numbers)
    return swap_channels(out, 8 // nbits, _places(nbits, width, packed.device)[0].itemsize)[..., :size]


def times(x: Tensor, y: Tensor) -> Tensor:
    """Multiply batches of matrices like `torch.bmm`, but with oneDNN where it is faster."""
    plain = x.dtype != torch.float32 or y.dtype != torch.float32 or x.requires_grad or x.is_cuda
    if plain or x.shape[1] == 1 or y[0].numel() < MIN_ONEDNN or not onednn.there():
        return torch.bmm(x, y)
    products = [onednn.times(a, b.T) for a, b in zip(x, y, strict=True)]
    return products[0][None] if len(products) == 1 else torch.stack(products)


@cache
def _places(nbits: int, width: int, device: torch.device) -> tuple[torch.dtype, Tensor, Tensor]:
    """Return the word's integer type, the shifts (8 / nbits,) and the bit mask of `unpack_bytes`.

    The word is the widest type whose size divides `width` bytes. A shift moves one code of each byte to the
    lowest bits of the byte, and the mask clears all other bits of the word.
    """
    word = next(size for size in (8, 4, 2, 1) if width % size == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
    moves = torch.arange(8 - nbits, -1, -nbits, dtype=kind, device=device)
    mask = torch.full((word,), 2**nbits - 1, dtype=torch.uint8, device=device)
    return kind, moves, mask.view(kind)


def unpack_bytes(packed: Tensor, nbits: int) -> Tensor:
    """Unpack codes (blocks, tokens, bytes) to one byte per code, with permuted channels.

    A shift and a mask of a word extract one code from each byte of the word. So the channels of a word of w
    bytes with c codes each have the order (c, w) instead of (w, c). With 2 bits and words of 8 bytes it is 0,
    4, ..., 28, then 1, 5, ..., 29, and so on. `swap_channels` permutes the other factor in the same way.
    """
    if nbits == 8:
        return packed
    kind, moves, mask = _places(nbits, packed.shape[2], packed.device)
    codes = (packed.contiguous().view(kind).unsqueeze(3) >> moves).bitwise_and_(mask)
    return codes.view(torch.int8).flatten(2)


def swap_channels(x: Tensor, outer: int, inner: int) -> Tensor:
    """Permute the channels (last axis) of every word from the order (outer, inner) to (inner, outer)."""
    return x.view(*x.shape[:2], -1, outer, inner).transpose(3, 4).reshape(x.shape) if inner > 1 < outer else x


def unpack_blocks(packed: Tensor, nbits: int, many: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of blocks, in multiples of `many`, and their codes unpacked to one byte each."""
    at_once = many * max(1, MAX_CODES // (many * packed.shape[1] * packed.shape[2] * (8 // nbits)))
    for first in range(0, len(packed), at_once):
        rows = slice(first, first + at_once)
        yield rows, unpack_bytes(packed[rows], nbits)


def unpack_numbers(packed: Tensor, nbits: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield slices of blocks and of tokens, and their codes as floats (blocks, tokens, channels).

    All results share one buffer, because allocating memory costs more than unpacking.
    """
    blocks, tokens, width = packed.shape
    size = width * (8 // nbits)
    length = max(1, min(tokens, MAX_FLOATS // size))
    many = max(1, min(blocks, MAX_FLOATS // (size * length)))
    buffer = torch.empty(many * length * size, dtype=dtype, device=packed.device)
    for rows, codes in unpack_blocks(packed, nbits, many):
        for a in range(0, len(codes), many):
            for b in range(0, tokens, length):
                piece = codes[a : a + many, b : b + length]
                which = slice(rows.start + a, rows.start + a + len(piece))
                yield which, slice(b, b + length), buffer[: piece.numel()].view(piece.shape).copy_(piece)


def fits_bytes(x: Tensor, packed: Tensor, nbits: int) -> bool:
    """Whether int8 products are faster than float products for `x`, queries or attention weights."""
    small = nbits <= 4 and x.shape[1] <= MAX_QUERIES and x.dtype == torch.float32
    return small and packed.shape[1] >= MIN_TOKENS and multiplies_bytes()


@cache
def multiplies_bytes() -> bool:
    """Whether this processor multiplies int8 matrices fast and exactly."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    x, y = torch.full((1, 64), -128, dtype=torch.int8), torch.full((64, 16), 15, dtype=torch.int8)
    try:
        product = torch._int_mm(x, y)
    except (AttributeError, RuntimeError):
        return False
    # The product is wrong if the CPU's instructions saturate at 16 bits.
    return bool((product == -64 * 128 * 15).all())


def split_digits(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Convert numbers (blocks, Q, k) to fixed point: a unit per row and three int8 digits per number.

    Returns units (blocks, Q, 1) and digits (blocks, 3 Q, k), lowest first. A row's maximum is `most` units.
    """
    unit = x.abs().amax(-1, keepdim=True).mul_(1 / most).add_(TINY)
    # Split an integer into bytes that are signed digits, -128 to 127: add 0x80 to each byte (a byte above 127
    # then carries into the next) and flip each byte's highest bit, which subtracts 0x80. The 0.5 rounds.
    whole = (x / unit).add_(OFFSET + 0.5).to(torch.int32).bitwise_xor_(_constant(OFFSET, x.device))
    digits = (whole.unsqueeze(1) >> _constant((0, 8, 16), x.device)).to(torch.int8)
    return unit, digits.flatten(1, 2)


def multiply_digits(digits: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply digits (blocks, 3 Q, k) with bytes (blocks, k, n), and add the three digits' products."""
    sums = torch.empty(len(codes), digits.shape[1], codes.shape[2], dtype=torch.int32)
    for a, b, product in zip(digits, codes, sums, strict=True):
        torch._int_mm(a, b, out=product)
    low, middle, high = sums.to(dtype).view(len(sums), DIGITS, -1, sums.shape[2]).unbind(1)
    return low.add_(middle.add_(high, alpha=BASE), alpha=BASE)


@cache
def _constant(value: int | tuple[int, ...], device: torch.device) -> Tensor:
    """Return an int32 tensor, cached per device: a scalar, or (n, 1, 1) for a tuple."""
    number = torch.tensor(value, dtype=torch.int32, device=device)
    return number[:, None, None] if number.dim() else number
