"""Quantisation to 1, 2, 4 or 8 bits, with packing, range rules, rotation and score calibration.

A code is an integer from 0 to `2 ** nbits - 1` that represents `low + scale * code`. Codes with the same
scale form a group: the tokens of one channel, or neighbouring channels of one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["shrunk", "centred", "quantile", "range", "fitted"]
Side = Literal["keys", "values"]
FIT_ROUNDS = 6  # iterations of the rule "fitted"
BITS = (1, 2, 4, 8)  # supported bits per code: divisors of 8
FLAT = 1e-6  # groups with a smaller range count as constant
SHRINK = {"keys": 0.5, "values": 0.3}  # range factors of CalibQuant (arXiv 2502.14882) at one bit
QUANTILE = 0.2  # fraction cut off at each end by "quantile" at one bit (our reading); 0 at more bits
# By bits: half the range, in standard deviations, of the best uniform quantiser for a Gaussian.
GAUSSIAN = {1: 0.798, 2: 1.494, 4: 2.514, 8: 3.927}


def pack(codes: Tensor, nbits: int) -> Tensor:
    """Pack codes (..., n) into bytes (..., ceil(n * nbits / 8)), the first code in the highest bits.

    The last byte is padded with zeros. The 2-bit codes a, b, c, d become the byte aabbccdd.
    """
    each = 8 // nbits
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % each))
    packed = torch.zeros_like(codes[..., ::each])
    for j in range(each):  # code j of every byte, for all bytes at once
        packed |= codes[..., j::each] << (nbits * (each - 1 - j))
    return packed


def unpack(packed: Tensor, nbits: int, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Unpack bytes (..., m) to the first `size` codes (..., size); the inverse of `pack`."""
    # One table look-up gives all codes of a byte, in the requested precision.
    return table(nbits, dtype, packed.device)[packed.int()].flatten(-2)[..., :size]


@cache
def table(nbits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table (256, 8 / nbits) of the codes in every possible byte."""
    shifts = torch.arange(8 - nbits, -1, -nbits)  # the first code is in the highest bits
    return ((torch.arange(256)[:, None] >> shifts) & (2**nbits - 1)).to(device, dtype)


def bounds(
    x: Tensor, valid: Tensor, dim: int, nbits: int, rule: Rule, side: Side = "keys"
) -> tuple[Tensor, Tensor]:
    """Choose the values of the lowest and the highest code of every group, along the axis `dim`.

    `valid` marks the numbers that count and broadcasts to `x`. A constant group keeps its constant. Rules:

    - "range": minimum and maximum (KIVI, arXiv 2402.02750);
    - "shrunk": as "range", but one-bit ranges are multiplied by 0.5 for keys and 0.3 for values (CalibQuant,
      arXiv 2502.14882, as in its code);
    - "centred": as "range", but one-bit ranges shrink towards their midpoint, which stays (our variant);
    - "quantile": as "range", but one-bit ranges omit a fifth at each end (CalibQuant's first version);
    - "fitted": least squared error, by a few rounds of assigning codes and fitting levels (ours). Keys of
      more than one bit get "range", because cutting their outliers changes answers.
    """
    valid = valid.expand(x.shape)
    least = x.masked_fill(~valid, torch.inf).amin(dim, keepdim=True)
    most = x.masked_fill(~valid, -torch.inf).amax(dim, keepdim=True)
    none = least > most  # groups without valid numbers: `least` is inf, `most` is -inf
    least, most = least.masked_fill(none, 0), most.masked_fill(none, 0)
    shrink = SHRINK[side] if nbits == 1 else 1.0
    low, high = least, most
    match rule:
        case "shrunk":
            low, high = shrink * least, shrink * most
        case "centred":
            middle, half = (least + most) / 2, shrink * (most - least) / 2
            low, high = middle - half, middle + half
        case "quantile" if nbits == 1:
            low, high = (quantile(x, valid, dim, level) for level in (QUANTILE, 1 - QUANTILE))
        case "fitted" if nbits == 1 or side == "values":
            low, high = fit(x, valid, dim, nbits, least, most)
    flat = most - least < FLAT
    return torch.where(flat, least, low), torch.where(flat, most, high)


def quantile(x: Tensor, valid: Tensor, dim: int, level: float) -> Tensor:
    """Compute a quantile of the valid numbers along `dim` (kept, of size 1), with linear interpolation."""
    # Sort invalid numbers to the end; groups without valid numbers get 0.
    ordered = x.masked_fill(~valid, torch.inf).sort(dim).values
    place = level * (valid.sum(dim, keepdim=True) - 1).clamp(min=0).to(x.dtype)
    below, above = (ordered.gather(dim, at.long()) for at in (place.floor(), place.ceil()))
    return torch.where(
        below.isinf(), 0, torch.lerp(below, above.where(above.isfinite(), below), place.frac())
    )


def fit(x: Tensor, valid: Tensor, dim: int, nbits: int, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Fit evenly spaced levels by least squares, alternating between assigning codes and fitting a line.

    It starts from the best levels for a Gaussian; at one bit it converges to two cluster means. For codes c
    of numbers x the line is slope = cov(c, x) / var(c), low = mean(x) - slope * mean(c).
    """
    weight = valid.to(x.dtype)
    count = weight.sum(dim, keepdim=True).clamp(min=1)
    mean = (x * weight).sum(dim, keepdim=True) / count
    spread = (((x - mean) * weight) ** 2).sum(dim, keepdim=True).div(count).sqrt()
    low = torch.maximum(mean - GAUSSIAN[nbits] * spread, least)
    high = torch.minimum(mean + GAUSSIAN[nbits] * spread, most)
    top = 2**nbits - 1
    for _ in range(FIT_ROUNDS):
        scale = ((high - low) / top).clamp(min=FLAT / top)  # distance between neighbouring levels
        codes = ((x - low) / scale).clamp(0, top).round()
        middle = (codes * weight).sum(dim, keepdim=True) / count
        away = (codes - middle) * weight
        variance = (away**2).sum(dim, keepdim=True)
        slope = (away * x).sum(dim, keepdim=True) / variance.clamp(min=FLAT)
        slope = torch.where((variance > FLAT) & (slope > 0), slope, scale)
        low = mean - slope * middle
        high = low + top * slope
    return low, high


@dataclass(frozen=True)
class Codes:
    """Quantised numbers (..., n tokens, D channels); `packed` is (..., n, ceil(D * nbits / 8)) uint8.

    `scale` and `low` are (..., 1, D), shared by tokens, or (..., n, D / g), shared by g channels of a token.
    """

    packed: Tensor
    scale: Tensor
    low: Tensor
    nbits: int
    size: int
    by_token: bool  # whether scales are (..., n, D / g); the shapes are ambiguous if n and g are 1

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, keyed by name."""
        return {"packed": self.packed, "scale": self.scale, "low": self.low}

    def map(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Return the codes with a function applied to all tensors."""
        return replace(self, **{name: change(x) for name, x in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        """Memory of all tensors in bytes."""
        return sum(x.nbytes for x in self.tensors.values())


def quantize(
    x: Tensor, nbits: int, *, valid: Tensor | None = None, rule: Rule = "range", side: Side = "keys",
    channels: int = 0,
) -> Codes:  # fmt: skip
    """Quantise (..., tokens, channels) with a scale per channel, or per `channels` channels of a token.

    `valid` (..., tokens, 1) marks the tokens that count; other tokens get code 0 and do not change a range.
    Ranges are computed in float32 or float64, scales are stored in the precision of `x`. Codes are clamped,
    then rounded, ties to even.
    """
    if nbits not in BITS:
        raise ValueError(f"`nbits` must be one of {', '.join(map(str, BITS))}, not {nbits}")
    size, stored = x.shape[-1], x.dtype
    if channels and size % channels:
        raise ValueError(f"groups of {channels} channels do not divide a head of size {size}")
    exact = x if x.dtype == torch.float64 else x.float()
    valid = torch.ones_like(exact[..., :1], dtype=torch.bool) if valid is None else valid
    where, dim = valid, -2
    if channels:  # split the last axis into groups of channels
        exact, where, dim = exact.unflatten(-1, (-1, channels)), valid[..., None], -1
    low, high = bounds(exact, where, dim, nbits, rule, side)
    top = 2**nbits - 1
    scale = torch.where(high - low < FLAT, 1.0, (high - low) / top)
    # Compute the codes from the rounded (stored) scales.
    scale, low = scale.to(stored).to(exact.dtype), low.to(stored).to(exact.dtype)
    scale = torch.where(scale > 0, scale, 1.0)
    codes = ((exact - low) / scale).clamp(0, top).round().masked_fill(~where, 0)
    if channels:
        codes, scale, low = codes.flatten(-2), scale.squeeze(-1), low.squeeze(-1)
    return Codes(pack(codes, nbits), scale.to(stored), low.to(stored), nbits, size, bool(channels))


def dequantize(codes: Codes) -> Tensor:
    """Compute the numbers (..., tokens, channels) that codes represent."""
    x = unpack(codes.packed, codes.nbits, codes.size, codes.scale.dtype)
    if not codes.by_token:
        return x * codes.scale + codes.low
    x = x.unflatten(-1, (codes.scale.shape[-1], -1))
    return (x * codes.scale[..., None] + codes.low[..., None]).flatten(-2)


@cache
def rotation(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an orthonormal symmetric matrix (size, size) that spreads outliers over channels.

    It is a Walsh-Hadamard matrix, or a block diagonal of them if the size is no power of two. Rotating
    queries and keys preserves their products; sums of values are rotated back (AKVQ-VL, arXiv 2501.15021).
    """
    block = size & -size  # the largest power of two that divides the size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    while hadamard.shape[0] < block:
        hadamard = torch.kron(pair, hadamard)
    return torch.block_diag(*[hadamard] * (size // block)).to(device, dtype)


def rotate(x: Tensor) -> Tensor:
    """Rotate the channels (last axis) of tokens or queries; the rotation is its own inverse."""
    return x @ rotation(x.shape[-1], x.dtype, x.device)


def calibrate(scores: Tensor, valid: Tensor, *, drop: float = 3.0, guard: bool = True) -> Tensor:
    """Compress visual attention scores linearly, so that the largest drops by `drop` nats (CalibQuant).

    `scores` (..., n) are already divided by sqrt(head size), before mask and softmax; the smallest score does
    not change. If the scores span less than `drop`, the published formula reverses their order; `guard` makes
    them equal instead (our reading).
    """
    valid = valid.expand(scores.shape)
    least = scores.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
    most = scores.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
    span = most - least
    slope = (span - drop) / (span + 1e-8)
    slope = slope.clamp(min=0) if guard else slope
    return torch.where(valid, least + (scores - least) * slope, scores)
