"""Binary codebooks: tokens as sums of codebook vectors, one bit per vector (experimental, our method).

A token of D channels is x = low + bits @ vectors with m vectors. It takes m / D bits per element, not
necessarily a whole number. Vectors start from the principal components (Karhunen-Loeve transform), with bits
allocated by reverse water-filling (textbook transform coding). Then vectors and bits are fitted alternately,
so that vectors need not stay orthogonal. This is additive quantization (Babenko and Lempitsky, CVPR 2014)
with codebooks of two entries; the sweep over single bits is ours. Fitting uses signs s = 2 * bits - 1 and
halved vectors, and subtracts the mean of the tokens first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmrl.kv_cache.packed_matmul import dots, mix
from mmrl.kv_cache.quantization import Codes, dequantize, pack, quantize, unpack

# Optimal uniform quantisers of a standard Gaussian with 0 to 8 bits: squared error, and half their range.
ERROR = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.00104, 0.0003035, 0.0000869)
HALF = (0.0, 0.798, 1.494, 2.051, 2.514, 2.915, 3.276, 3.613, 3.927)
MAX_BITS = len(ERROR) - 1  # maximum number of bits per component
MIN_VARIANCE = 1e-10  # components below this fraction of the largest variance get no bits
RIDGE = 1e-3  # ridge of least squares, per token, in case two vectors always have equal signs


@dataclass(frozen=True)
class Codebook:
    """A codebook: `low` (R, h, 1, D), and `vectors` (R, h, m, D) in 8 bits with one scale per vector.

    The sizes are R batch rows, h key heads, m vectors and D channels. `metric` (1, h, D, D) weights the error
    when bits are chosen. A `calibrated` codebook has one row for all prompts and takes no cache memory.
    """

    low: Tensor
    vectors: Codes
    metric: Tensor | None = None
    calibrated: bool = False

    @property
    def num_vectors(self) -> int:
        """Number of vectors of the codebook."""
        return self.vectors.packed.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of the codebook that a cache stores; 0 if calibrated."""
        return 0 if self.calibrated else self.vectors.nbytes + self.low.nbytes

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the offset `low` and the dequantised vectors of the codebook, in `dtype`."""
        return self.low.to(dtype), dequantize(self.vectors).to(dtype)

    def select(self, rows: Tensor) -> Codebook:
        """Return the codebook with only the given rows, in this order; unchanged if calibrated."""
        if self.calibrated:
            return self
        return replace(self, low=self.low[rows], vectors=self.vectors.map(lambda x: x[rows]))


def allocate_bits(variance: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Allocate `num` bits to components with variances (..., D), each where it lowers the error most.

    Returns two tensors (..., num): the component of every bit, and the number of the bit in its component,
    counted from 0. The largest gains come first. This is reverse water-filling with whole bits.
    """
    error = variance.new_tensor(ERROR)
    gains = variance[..., None] * (error[:-1] - error[1:])  # (..., D, MAX_BITS), gain of each additional bit
    best = gains.flatten(-2).topk(num, -1).indices
    return best // MAX_BITS, best % MAX_BITS


def initial_vectors(covariance: Tensor, num: int) -> Tensor:
    """Create vectors (..., num, D) for signs from the principal components of a covariance (..., D, D).

    A component with b bits gets b vectors along its axis, each half as long as the one before. Their signed
    sums are the 2^b levels of an optimal uniform quantiser.
    """
    variance, basis = torch.linalg.eigh(covariance.double())
    variance = variance.masked_fill(variance < MIN_VARIANCE * variance.amax(-1, keepdim=True), 0)
    which, level = allocate_bits(variance, num)
    number = torch.zeros_like(variance, dtype=torch.int64).scatter_add_(-1, which, torch.ones_like(which))
    number, spread = number.gather(-1, which), variance.gather(-1, which).sqrt()
    # The 2^b levels split the range 2 * half into 2^b - 1 steps; sign k of b moves x by 2^(b - 1 - k) steps.
    length = variance.new_tensor(HALF)[number] * spread * 2.0 ** (number - 1 - level) / (2.0**number - 1)
    columns = basis.gather(-1, which[..., None, :].expand(*basis.shape[:-1], num))  # (..., D, num)
    return (columns * length[..., None, :]).mT.to(covariance.dtype)


def choose_signs(
    x: Tensor, vectors: Tensor, *, signs: Tensor | None = None, metric: Tensor | None = None, sweeps: int = 1
) -> Tensor:
    """Choose signs (..., n, m), -1 or 1, such that signs @ vectors approximates x (..., n, D).

    Uses coordinate descent on e' metric e with e = x - signs @ vectors: sign j becomes the sign of v_j'
    metric (x - sum of the other signed vectors). Without `signs`, the first sweep starts from zeros.
    """
    weighted = vectors if metric is None else vectors @ metric
    inner, wanted = weighted @ vectors.mT, weighted @ x.mT  # (..., m, m) and (..., m, n)
    signs = torch.zeros_like(wanted) if signs is None else signs.mT.clone()
    own = inner.diagonal(dim1=-2, dim2=-1)[..., None]
    for j in list(range(signs.shape[-2])) * sweeps:  # `signs` is (..., m, n) here
        # v_j' metric times the sum of all signed vectors except vector j
        others = (inner[..., j, None, :] @ signs)[..., 0, :] - own[..., j, :] * signs[..., j, :]
        signs[..., j, :] = (wanted[..., j, :] >= others).to(x.dtype).mul_(2).sub_(1)
    return signs.mT


def fit_vectors(x: Tensor, signs: Tensor, count: Tensor) -> Tensor:
    """Fit vectors (..., m, D) to `count` tokens by least squares; signs (..., n, m) are 0 in padding."""
    ridge = RIDGE * count.clamp(min=1) * torch.eye(signs.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(signs.mT @ signs + ridge, signs.mT @ x)


def fit(
    x: Tensor, nbits: float, *, valid: Tensor | None = None, metric: Tensor | None = None, rounds: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Approximate tokens by a mean plus m vectors, each with the sign +1 or -1 of the token.

    `x` has R rows, h heads, n tokens and D channels; `valid` (R, 1, n, 1) is False for padding. `metric`
    weights the squared error; `rounds` counts the alternating updates of vectors and signs.

    Returns the mean (R, h, 1, D), m vectors (R, h, m, D) and the signs (R, h, n, m) of the tokens.
    """
    exact = x if x.dtype == torch.float64 else x.float()
    weight = torch.ones_like(exact[..., :1]) if valid is None else valid.expand_as(exact[..., :1]).to(exact)
    count = weight.sum(-2, keepdim=True)
    mean = (exact * weight).sum(-2, keepdim=True) / count.clamp(min=1)
    away = (exact - mean) * weight
    # A vector costs one bit per token, so `nbits` bits per element pay for `nbits` vectors per channel.
    num, covariance = max(1, round(nbits * x.shape[-1])), away.mT @ away / count.clamp(min=1)
    if metric is None:
        vectors = initial_vectors(covariance, num)
    else:
        # Let root be the symmetric square root of the metric. For u = root @ x, the weighted error becomes an
        # unweighted one, so fit vectors to u and map them back.
        values, basis = torch.linalg.eigh(metric.double())
        values = values.clamp(min=1e-12).sqrt()[..., None, :]
        root, inverse = ((x @ basis.mT).to(metric.dtype) for x in (basis * values, basis / values))
        vectors = initial_vectors(root @ covariance @ root, num) @ inverse
    signs = choose_signs(away, vectors, metric=metric)
    for number in range(rounds + 1):
        vectors = fit_vectors(away, signs * weight, count)
        if number < rounds:
            signs = choose_signs(away, vectors, signs=signs, metric=metric)
    return mean, vectors, signs


def quantize_codebook(mean: Tensor, vectors: Tensor, dtype: torch.dtype) -> Codebook:
    """Convert mean and vectors v of a code of signs (+v or -v) to an 8-bit codebook of bits (0 or 2 v)."""
    codes = quantize((2 * vectors).to(dtype), 8, channels=vectors.shape[-1])
    low = mean - dequantize(codes).to(mean.dtype).sum(-2, keepdim=True) / 2
    return Codebook(low.to(dtype), codes)


def encode(x: Tensor, codebook: Codebook, *, signs: Tensor | None = None, sweeps: int = 3) -> Tensor:
    """Encode tokens (R, h, n, D) as packed bits (R, h, n, ceil(m / 8)) uint8, one per codebook vector.

    Pass the `signs` of `fit` if available: a start from zeros gives larger errors, above all for many bits.
    """
    exact = x if x.dtype == torch.float64 else x.float()
    low, vectors = codebook.dense(exact.dtype)
    vectors = vectors / 2
    # low + bits @ V = (low + sum of V / 2) + signs @ V / 2, with bits = (signs + 1) / 2
    away = exact - low - vectors.sum(-2, keepdim=True)
    metric = None if codebook.metric is None else codebook.metric.to(exact.dtype)
    return pack(choose_signs(away, vectors, signs=signs, metric=metric, sweeps=sweeps) > 0, 1)


def decode(packed: Tensor, codebook: Codebook) -> Tensor:
    """Decode packed bits to tokens (R, h, n, D), using the codebook."""
    low, vectors = codebook.dense(codebook.low.dtype)
    return unpack(packed, 1, codebook.num_vectors, low.dtype) @ vectors + low


@dataclass(frozen=True)
class CodebookBlock:
    """A block of tokens stored as packed bits (R, h, n, bytes) of a codebook.

    With x = low + bits @ V, attention products need no decoded tokens:
    q . x = (V q) . bits + q . low, and sum_n w_n x_n = (sum_n w_n bits_n) @ V + low * sum_n w_n.
    """

    packed: Tensor
    codebook: Codebook

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.codebook.nbytes

    def dots(self, query: Tensor) -> Tensor:
        low, vectors = self.codebook.dense(query.dtype)
        scores = dots((query @ vectors.mT).flatten(0, 1), self.packed.flatten(0, 1), 1)
        return scores.view(*query.shape[:3], -1).add_(query @ low.mT)

    def mix(self, weights: Tensor) -> Tensor:
        low, vectors = self.codebook.dense(weights.dtype)
        sums = mix(weights.flatten(0, 1), self.packed.flatten(0, 1), 1, self.codebook.num_vectors)
        return sums.view(*weights.shape[:3], -1) @ vectors + weights.sum(-1, keepdim=True) * low

    def dense(self) -> Tensor:
        return decode(self.packed, self.codebook)

    def select(self, rows: Tensor) -> CodebookBlock:
        return replace(self, packed=self.packed[rows], codebook=self.codebook.select(rows))
