"""Products of queries and attention weights with packed codes: what the fused path is made of.

`M` blocks of `n` tokens with `D` channels each; scales are folded into the other factor by whoever calls. On
a CPU codes are written out: as numbers or, for few queries of float32, as bytes. What they are multiplied
with becomes three digits of a byte each then, and matrices of bytes are multiplied, exactly but for what is a
two-millionth of the largest number or less. One row of a small model takes so little that a call of torch
costs as much as the work of thousands of numbers: what follows is written for few calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from mmrl.core import onednn

HELD = 1 << 18  # numbers written out at once: with their codes they about fill a second-level cache
CODES = 1 << 22  # codes written out at once: calls cost more than what leaves a cache
WORTH = 256  # tokens that make a call for every block worth its while
MANY = 1 << 16  # numbers of a block above which oneDNN is asked for each
FEW = 12  # queries of a block up to which products of bytes are faster than those of floats
DIGITS, BASE = 3, 256  # a float32 as bytes from -128 to 127
LARGEST = (1 << 23) - 0x8100  # what the largest number becomes: its highest digit is 127 at most
SIGNS = 0x8080  # added before the lower digits are cut out and taken off behind, which gives them signs
LEAST = 1 << 21  # what the largest number becomes at least; more channels are not multiplied as bytes
TINY = 1e-36  # what a unit is worth where all numbers are 0


def dots(query: Tensor, packed: Tensor, nbits: int, base: Tensor | None = None) -> Tensor:
    """Multiply queries (M, Q, D) with codes (M, n, bytes) and add `base` (M, Q, 1): (M, Q, n)."""
    if packed.is_cuda:
        from mmrl.kv_cache.kernels import triton_matmul

        out = triton_matmul.dots(query, packed, nbits)
        return out if base is None else out.add_(base)
    query = _in_order(query, packed.shape[2], nbits)
    top = query.shape[2] * (2**nbits - 1)
    out = query.new_empty(*query.shape[:2], packed.shape[1])
    if _as_bytes(query, packed, nbits) and top * LEAST < 1 << 31:
        unit, digits = _digits(query, min(LARGEST, (1 << 31) // top - 1))
        for rows, codes in _codes(packed, nbits):
            out[rows] = _digit_dots(digits[rows], codes)
        out.mul_(unit)
    else:
        for rows, tokens, numbers in _numbers(packed, nbits, query.dtype):
            out[rows, :, tokens] = times(query[rows], numbers.mT)
    return out if base is None else out.add_(base)


def mix(weights: Tensor, packed: Tensor, nbits: int, size: int) -> Tensor:
    """Add up codes (M, n, bytes) by weights (M, Q, n): (M, Q, D)."""
    if packed.is_cuda:
        from mmrl.kv_cache.kernels import triton_matmul

        return triton_matmul.mix(weights, packed, nbits, size)
    (blocks, num, tokens), width = weights.shape, packed.shape[2]
    if _as_bytes(weights, packed, nbits) and tokens * (2**nbits - 1) << 7 < 1 << 31:
        unit, digits = _digits(weights, LARGEST)
        out = torch.cat([_digit_mix(digits[rows], codes) for rows, codes in _codes(packed, nbits)]).mul_(unit)
    else:
        out = weights.new_zeros(blocks, num, width * (8 // nbits))
        for rows, part, numbers in _numbers(packed, nbits, weights.dtype):
            out[rows] += times(weights[rows, :, part], numbers)
    return _as_packed(out, width, nbits)[..., :size]


def times(x: Tensor, y: Tensor) -> Tensor:
    """Multiply (m, Q, k) with (m, k, n): (m, Q, n)."""
    plain = x.dtype != torch.float32 or y.dtype != torch.float32 or x.requires_grad or x.is_cuda
    if plain or x.shape[1] == 1 or y[0].numel() < MANY or not onednn.there():
        return torch.bmm(x, y)
    found = [onednn.times(one, other.T) for one, other in zip(x, y, strict=True)]
    return found[0][None] if len(found) == 1 else torch.stack(found)


# ---- codes, a byte each


@cache
def _places(nbits: int, width: int, device: torch.device) -> tuple[torch.dtype, Tensor, Tensor]:
    """Find how codes are written: the longest word that tokens of `width` bytes consist of, how far it moves
    for each of a byte's codes (8 / nbits,), and what is left of it."""
    word = next(size for size in (8, 4, 2, 1) if width % size == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
    moves = torch.arange(8 - nbits, -1, -nbits, dtype=kind, device=device)
    mask = torch.full((word,), 2**nbits - 1, dtype=torch.uint8, device=device)
    return kind, moves, mask.view(kind)


def write(packed: Tensor, nbits: int) -> Tensor:
    """Write (m, n, bytes) to bytes (m, n, codes), a word at a time.

    Codes of one place in their bytes stand together: channels of a word of w bytes with c codes each come as
    (c, w) instead of (w, c).
    """
    if nbits == 8:
        return packed
    kind, moves, mask = _places(nbits, packed.shape[2], packed.device)
    codes = (packed.contiguous().view(kind).unsqueeze(3) >> moves).bitwise_and_(mask)
    return codes.view(torch.int8).flatten(2)


def _in_order(x: Tensor, width: int, nbits: int) -> Tensor:
    """Bring channels (M, Q, D) into the order in which codes are written."""
    each = 8 // nbits
    x = x if x.shape[2] == width * each else nn.functional.pad(x, (0, width * each - x.shape[2]))
    return _swap(x, _places(nbits, width, x.device)[0].itemsize, each)


def _as_packed(x: Tensor, width: int, nbits: int) -> Tensor:
    """Bring channels back into their own order."""
    return _swap(x, 8 // nbits, _places(nbits, width, x.device)[0].itemsize)


def _swap(x: Tensor, outer: int, inner: int) -> Tensor:
    return x.view(*x.shape[:2], -1, outer, inner).transpose(3, 4).reshape(x.shape) if inner > 1 < outer else x


def _codes(packed: Tensor, nbits: int, many: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Write codes out, some blocks at once, a multiple of `many`: yields which, and bytes (m, n, codes)."""
    at_once = many * max(1, CODES // (many * packed.shape[1] * packed.shape[2] * (8 // nbits)))
    for first in range(0, len(packed), at_once):
        rows = slice(first, first + at_once)
        yield rows, write(packed[rows], nbits)


def _numbers(packed: Tensor, nbits: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """Write codes out as numbers: yields which blocks, which tokens, and numbers (m, t, D), which the next
    piece overwrites: fresh memory costs more than the work. Long blocks come one by one."""
    blocks, tokens, width = packed.shape
    size = width * (8 // nbits)
    length = max(1, min(tokens, HELD // size))
    many = max(1, min(blocks, HELD // (size * length)))
    held = torch.empty(many * length * size, dtype=dtype, device=packed.device)
    for rows, codes in _codes(packed, nbits, many):
        for a in range(0, len(codes), many):
            for b in range(0, tokens, length):
                piece = codes[a : a + many, b : b + length]
                which = slice(rows.start + a, rows.start + a + len(piece))
                yield which, slice(b, b + length), held[: piece.numel()].view(piece.shape).copy_(piece)


# ---- numbers as digits


def _as_bytes(x: Tensor, packed: Tensor, nbits: int) -> bool:
    small = nbits <= 4 and x.shape[1] <= FEW and x.dtype == torch.float32
    return small and packed.shape[1] >= WORTH and multiplies_bytes()


@cache
def multiplies_bytes() -> bool:
    """Tell whether this processor multiplies matrices of bytes, fast and exactly."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    x, y = torch.full((1, 64), -128, dtype=torch.int8), torch.full((64, 16), 15, dtype=torch.int8)
    try:
        found = torch._int_mm(x, y)
    except (AttributeError, RuntimeError):
        return False
    return bool((found == -64 * 128 * 15).all())


def _digits(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Write numbers (M, Q, k) as bytes (M, 3 Q, k), the lowest digits first, and what a unit is worth:
    (M, Q, 1). The largest number becomes `most` units."""
    unit = x.abs().amax(-1, keepdim=True).mul_(1 / most).add_(TINY)
    # Half a unit more: cutting off rounds then, and weights do not shrink together.
    whole = (x / unit).add_(SIGNS + 0.5).to(torch.int32).bitwise_xor_(_signs(x.device))
    digits = (whole.unsqueeze(1) >> _moves(x.device)).to(torch.int8)
    return unit, digits.flatten(1, 2)


def _digit_dots(digits: Tensor, codes: Tensor) -> Tensor:
    """Multiply digits (m, 3 Q, D) with codes (m, n, D) and put them together: (m, Q, n) in units. Sums fit
    into 32 bits, because the digits were chosen so."""
    found = torch.empty(len(codes), digits.shape[1], codes.shape[1], dtype=torch.int32)
    for each, block, out in zip(digits, codes.mT, found, strict=True):
        torch._int_mm(each, block, out=out)
    low, middle, high = found.view(len(codes), DIGITS, -1, codes.shape[1]).unbind(1)
    return low.add_(middle.add_(high, alpha=BASE), alpha=BASE)


def _digit_mix(digits: Tensor, codes: Tensor) -> Tensor:
    """Add up codes (m, n, D) by digits (m, 3 Q, n) and put them together: (m, Q, D) in units."""
    found = torch.empty(len(codes), digits.shape[1], codes.shape[2], dtype=torch.int32)
    for each, block, out in zip(digits, codes, found, strict=True):
        torch._int_mm(each, block, out=out)
    low, middle, high = found.float().view(len(codes), DIGITS, -1, codes.shape[2]).unbind(1)
    return low.add_(middle.add_(high, alpha=BASE), alpha=BASE)


@cache
def _moves(device: torch.device) -> Tensor:
    return torch.tensor([0, 8, 16], dtype=torch.int32, device=device)[:, None, None]


@cache
def _signs(device: torch.device) -> Tensor:
    return torch.tensor(SIGNS, dtype=torch.int32, device=device)
