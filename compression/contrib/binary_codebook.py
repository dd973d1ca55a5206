"""Numbers as sums of vectors, one bit each: pure functions.

A token is `low` plus those of `m` vectors whose bit is 1: x = low + bits @ vectors. With as many vectors as
channels that is one bit a number, with half as many half a bit. Vectors start as bits of the components of a
Karhunen-Loeve transform, shared out by reverse water-filling (transform coding, as textbooks have it); then
vectors and bits are fitted to each other in turn, which lets vectors lean (additive quantization, Babenko and
Lempitsky, CVPR 2014, with codebooks of two entries; the sweep over single bits is ours).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmrl.kv_cache.quantization import Codes, dequantize, pack, quantize, unpack

# A Gaussian of variance 1 in 0 to 8 bits of evenly spaced levels: squared error, and half of their range.
ERROR = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.00104, 0.0003035, 0.0000869)
HALF = (0.0, 0.798, 1.494, 2.051, 2.514, 2.915, 3.276, 3.613, 3.927)
MOST = len(ERROR) - 1  # bits of one component
NOTHING = 1e-10  # a share of the largest variance below which a component has none
RIDGE = 1e-3  # of the least squares, as a share of the tokens: signs may always agree


@dataclass(frozen=True)
class Book:
    """What bits stand for: `low` (R, h, 1, D) and `vectors` (R, h, m, D) in 8 bits, one scale a vector.

    `metric` (1, h, D, D) weighs the error of which bits are chosen. A book that is `lent` has one row, which
    serves all prompts, and belongs to no cache.
    """

    low: Tensor
    vectors: Codes
    metric: Tensor | None = None
    lent: bool = False

    @property
    def many(self) -> int:
        """Count the vectors."""
        return self.vectors.packed.shape[-2]

    @property
    def nbytes(self) -> int:
        """Measure what a cache holds of it."""
        return 0 if self.lent else self.vectors.nbytes + self.low.numel() * self.low.element_size()

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give low and vectors as numbers."""
        return self.low.to(dtype), dequantize(self.vectors).to(dtype)

    def select(self, rows: Tensor) -> Book:
        """Keep rows, in this order."""
        if self.lent:
            return self
        return replace(self, low=self.low[rows], vectors=self.vectors.select(rows))


def count_vectors(nbits: float, size: int) -> int:
    """Count the vectors that make `nbits` bits a number."""
    return max(1, round(nbits * size))


def share_bits(variance: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """Give `many` bits to components of variances (..., D), each to the one whose error it lowers most:
    (..., many) numbers of components and, for each, which bit of it this is, from 0 on.

    That is reverse water-filling in whole bits. The largest gains come first.
    """
    error = variance.new_tensor(ERROR)
    gains = variance[..., None] * (error[:-1] - error[1:])
    best = gains.flatten(-2).topk(many, -1).indices
    return best // MOST, best % MOST


def first_vectors(covariance: Tensor, many: int) -> Tensor:
    """Write the bits of the components of a covariance (..., D, D) as vectors with signs: (..., many, D).

    The signs of a component of b bits are worth a half, a quarter and so on of the range of its levels.
    """
    variance, basis = torch.linalg.eigh(covariance.double())
    variance = variance.masked_fill(variance < NOTHING * variance.amax(-1, keepdim=True), 0)
    which, level = share_bits(variance, many)
    number = torch.zeros_like(variance, dtype=torch.int64).scatter_add_(-1, which, torch.ones_like(which))
    number, spread = number.gather(-1, which), variance.gather(-1, which).sqrt()
    # 2^b levels over twice the half range: the first sign moves by 2^(b - 1) of 2^b - 1 half steps.
    worth = variance.new_tensor(HALF)[number] * spread * 2.0 ** (number - 1 - level) / (2.0**number - 1)
    columns = basis.gather(-1, which[..., None, :].expand(*basis.shape[:-1], many))
    return (columns * worth[..., None, :]).mT.to(covariance.dtype)


def choose_signs(
    x: Tensor, vectors: Tensor, *, signs: Tensor | None = None, metric: Tensor | None = None, sweeps: int = 1
) -> Tensor:
    """Choose signs (..., n, m), -1 or 1, so that signs @ vectors is near x (..., n, D).

    Sign by sign the better one of two, given the others; without `signs` the first sweep takes what is left
    by those before. Near is by x' metric x.
    """
    seen = vectors if metric is None else vectors @ metric
    inner, wanted = seen @ vectors.mT, seen @ x.mT
    signs = torch.zeros_like(wanted) if signs is None else signs.mT.clone()
    own = inner.diagonal(dim1=-2, dim2=-1)[..., None]
    for j in list(range(signs.shape[-2])) * sweeps:
        others = (inner[..., j, None, :] @ signs)[..., 0, :] - own[..., j, :] * signs[..., j, :]
        signs[..., j, :] = (wanted[..., j, :] >= others).to(x.dtype).mul_(2).sub_(1)
    return signs.mT


def fit_vectors(x: Tensor, signs: Tensor, count: Tensor) -> Tensor:
    """Find vectors (..., m, D) of least squared error; padded tokens have signs of 0. `count` (..., 1, 1)."""
    ridge = RIDGE * count.clamp(min=1) * torch.eye(signs.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(signs.mT @ signs + ridge, signs.mT @ x)


def root(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Find the symmetric root of a metric (..., D, D), and its inverse."""
    values, basis = torch.linalg.eigh(metric.double())
    values = values.clamp(min=1e-12).sqrt()[..., None, :]
    return ((basis * values) @ basis.mT).to(metric.dtype), ((basis / values) @ basis.mT).to(metric.dtype)


def fit(
    x: Tensor, nbits: float, *, valid: Tensor | None = None, metric: Tensor | None = None, rounds: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit vectors (R, h, m, D) of signs to tokens (R, h, n, D), of which `valid` (R, 1, n, 1) count: the mean
    (R, h, 1, D), the vectors, and the signs (R, h, n, m)."""
    exact = x if x.dtype == torch.float64 else x.float()
    weight = torch.ones_like(exact[..., :1]) if valid is None else valid.expand_as(exact[..., :1]).to(exact)
    count = weight.sum(-2, keepdim=True)
    mean = (exact * weight).sum(-2, keepdim=True) / count.clamp(min=1)
    away = (exact - mean) * weight
    many, covariance = count_vectors(nbits, x.shape[-1]), away.mT @ away / count.clamp(min=1)
    if metric is None:
        vectors = first_vectors(covariance, many)
    else:
        forth, back = root(metric)
        vectors = first_vectors(forth @ covariance @ forth, many) @ back
    signs = choose_signs(away, vectors, metric=metric)
    for number in range(rounds + 1):
        vectors = fit_vectors(away, signs * weight, count)
        if number < rounds:
            signs = choose_signs(away, vectors, signs=signs, metric=metric)
    return mean, vectors, signs


def hold(mean: Tensor, vectors: Tensor, dtype: torch.dtype) -> Book:
    """Hold a mean and vectors of signs: a bit is worth twice its vector, above where all signs are -1."""
    held = quantize((2 * vectors).to(dtype), 8, channels=vectors.shape[-1])
    low = mean - dequantize(held).to(mean.dtype).sum(-2, keepdim=True) / 2
    return Book(low.to(dtype), held)


def encode(x: Tensor, book: Book, *, signs: Tensor | None = None, sweeps: int = 3) -> Tensor:
    """Choose the bits of tokens (R, h, n, D): packed, (R, h, n, ceil(m / 8)) uint8.

    Those who have `signs` from fitting the book should go on from them: what is found from nothing is worse,
    the more so the more bits there are.
    """
    exact = x if x.dtype == torch.float64 else x.float()
    low, vectors = book.dense(exact.dtype)
    vectors = vectors / 2
    away = exact - low - vectors.sum(-2, keepdim=True)
    metric = None if book.metric is None else book.metric.to(exact.dtype)
    return pack(choose_signs(away, vectors, signs=signs, metric=metric, sweeps=sweeps) > 0, 1)


def decode(packed: Tensor, book: Book) -> Tensor:
    """Give back the tokens (R, h, n, D) that bits stand for."""
    low, vectors = book.dense(book.low.dtype)
    return unpack(packed, 1, book.many, low.dtype) @ vectors + low
