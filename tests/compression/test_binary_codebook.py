"""Binary codebooks: allocation of bits, fitting, packing and the block of a cache."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmrl.compression.contrib.binary_codebook import (
    Codebook,
    CodebookBlock,
    allocate_bits,
    choose_signs,
    decode,
    encode,
    fit,
    fit_vectors,
    initial_vectors,
    quantize_codebook,
)


def tokens(rows: int = 2, heads: int = 3, num: int = 200, size: int = 16, seed: int = 0):
    """Draw tokens whose channels go together, around a mean."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, heads, size, size, generator=draw, dtype=torch.float64)
    spread = 0.7 ** torch.arange(size, dtype=torch.float64)
    plain = torch.randn(rows, heads, num, size, generator=draw, dtype=torch.float64)
    return (plain * spread) @ mixed + 3


def made(x: torch.Tensor, nbits: float) -> tuple[Codebook, torch.Tensor]:
    """Fit a codebook; returns its signs as well."""
    mean, vectors, signs = fit(x, nbits)
    return quantize_codebook(mean, vectors, x.dtype), signs


def lost(x: torch.Tensor, found: torch.Tensor) -> float:
    """Measure the share of the variance that is lost."""
    return float((x - found).square().sum() / (x - x.mean(-2, keepdim=True)).square().sum())


def test_bits_go_where_they_lower_the_error_most():
    # A Gaussian of variance 1 has error 0.3634 after one bit and 0.1188 after two: gains 0.6366 and 0.2446.
    # Variances 4 and 1: 4 * 0.6366 = 2.55, 4 * 0.2446 = 0.98, 4 * (0.1188 - 0.0374) = 0.33 and 0.64, 0.24.
    which, level = allocate_bits(torch.tensor([1.0, 4.0]), 4)
    assert (which.tolist(), level.tolist()) == ([1, 1, 0, 1], [0, 1, 0, 2])


def test_vectors_start_as_halves_and_quarters_of_a_component():
    # Variance 4 in two bits: four levels evenly over 2 * 1.494 * 2 = 5.976, 1.992 apart, so the signs are
    # worth 1.992 and 0.996. Variance 1 in one bit: 0.798 either way.
    found = initial_vectors(torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)), 3).abs()
    expected = torch.tensor([[0, 1.992], [0, 0.996], [0.798, 0]], dtype=torch.float64)
    assert_close(found, expected)


def test_a_component_that_is_constant_gets_no_bit():
    found = initial_vectors(torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64)), 10)
    assert found[:8].abs().amax(1).gt(0).all() and not found[8:].any()
    assert not initial_vectors(torch.zeros(2, 2), 4).any()


def test_signs_are_chosen_one_after_the_other():
    # 5 = 4 + 2 - 1 and -3 = -4 + 2 - 1; 0.5 = 4 - 2 - 1 by the same greedy rule.
    vectors = torch.tensor([[4.0], [2.0], [1.0]])
    signs = choose_signs(torch.tensor([[5.0], [-3.0], [0.5]]), vectors)
    assert signs.tolist() == [[1, 1, -1], [-1, 1, -1], [1, -1, -1]]
    # Leaning vectors: (0.2, 3) takes (2, 0), and (1, 1) of what is left, (-1.8, 3). Given that, (-0.8, 2) is
    # left for the first one, and a second sweep turns it around.
    leaning, x = torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.2, 3.0]])
    assert choose_signs(x, leaning).tolist() == [[1, 1]]
    assert choose_signs(x, leaning, sweeps=2).tolist() == [[-1, 1]]


def test_a_sweep_never_makes_it_worse():
    x = tokens()
    mean, vectors, _ = fit(x, 1.5, rounds=0)
    signs, gaps = None, []
    for _ in range(4):
        signs = choose_signs(x - mean, vectors, signs=signs)
        gaps.append(lost(x, signs @ vectors + mean))
    assert gaps == sorted(gaps, reverse=True) and gaps[3] < gaps[0]
    refit = fit_vectors(x - mean, signs, torch.full((2, 1, 1, 1), 200.0))
    assert lost(x, signs @ refit + mean) < gaps[3]


def test_a_metric_says_which_channels_matter():
    x = tokens(size=8)
    metric = torch.diag(torch.tensor([100.0] + [1.0] * 7, dtype=torch.float64)).expand(1, 3, 8, 8)
    plain, weighed = (fit(x, 1, metric=one) for one in (None, metric))
    gaps = []
    for (mean, vectors, _), one in ((plain, None), (weighed, metric)):
        signs = choose_signs(x - mean, vectors, metric=one, sweeps=3)
        gaps.append((signs @ vectors + mean - x).square().mean((0, 1, 2)))
    assert gaps[1][0] < 0.7 * gaps[0][0] and gaps[1][1:].sum() > gaps[0][1:].sum()


@pytest.mark.parametrize(("nbits", "most"), [(0.5, 0.12), (1, 0.03), (2, 0.003), (4, 4e-4)])
def test_more_bits_lose_less(nbits, most):
    x = tokens()
    codebook, signs = made(x, nbits)
    packed = encode(x, codebook, signs=signs)
    assert packed.shape[-1] == -(-round(nbits * 16) // 8)
    assert most / 4 < lost(x, decode(packed, codebook)) < most


def test_signs_from_fitting_are_a_better_start_than_none_and_are_left_alone():
    x = tokens()
    codebook, signs = made(x, 4)
    before = signs.clone()
    gaps = [lost(x, decode(encode(x, codebook, signs=start), codebook)) for start in (signs, None)]
    assert gaps[0] < 0.9 * gaps[1]
    assert torch.equal(signs, before)


def test_what_is_padded_changes_nothing():
    x = tokens(rows=1, num=40)
    valid = torch.ones(1, 1, 60, 1, dtype=torch.bool)
    valid[:, :, ::3] = False
    padded = torch.full((1, 3, 60, 16), 1e3, dtype=torch.float64)
    padded[:, :, valid[0, 0, :, 0]] = x
    for one, other in zip(fit(x, 1.5)[:2], fit(padded, 1.5, valid=valid)[:2], strict=True):
        assert_close(one, other)


def test_a_row_that_is_constant_or_empty_is_given_back():
    x = torch.full((1, 1, 20, 8), 2.5, dtype=torch.float64)
    codebook = made(x, 1)[0]
    assert_close(decode(encode(x, codebook), codebook), x)
    empty = fit(x, 1, valid=torch.zeros(1, 1, 20, 1, dtype=torch.bool))
    assert not empty[0].any() and not empty[1].any()


def test_a_block_multiplies_and_adds_up_what_it_stands_for():
    x = tokens(num=300)
    codebook = made(x, 1.3)[0]  # 21 vectors, which fill no whole bytes
    block = CodebookBlock(encode(x, codebook), codebook)
    draw = torch.Generator().manual_seed(1)
    query, weights = (torch.randn(2, 3, 5, size, generator=draw, dtype=torch.float64) for size in (16, 300))
    assert_close(block.dots(query), query @ block.dense().mT, rtol=0, atol=1e-10)
    assert_close(block.mix(weights), weights @ block.dense(), rtol=0, atol=1e-10)
    rows = torch.tensor([1, 0, 1])
    assert torch.equal(block.select(rows).dense(), block.dense()[rows])


def test_bytes_are_those_of_bits_vectors_and_low():
    x = tokens(num=1000).float()
    codebook = made(x, 1.5)[0]
    # 24 vectors of 16 bytes with scale and low in four bytes each, and 16 numbers for a token without a bit.
    assert codebook.nbytes == 2 * 3 * (24 * (16 + 2 * 4) + 16 * 4)
    assert CodebookBlock(encode(x, codebook), codebook).nbytes == codebook.nbytes + 2 * 3 * 1000 * 3
    calibrated = Codebook(codebook.low[:1], codebook.vectors.map(lambda x: x[:1]), None, calibrated=True)
    assert calibrated.nbytes == 0 and calibrated.select(torch.tensor([1, 0])) is calibrated


def test_numbers_in_half_precision_are_held_as_such():
    x = tokens().bfloat16()
    codebook = made(x, 2)[0]
    found = decode(encode(x, codebook), codebook)
    assert found.dtype == torch.bfloat16 and lost(x.float(), found.float()) < 0.004
    assert made(x, 0.01)[0].num_vectors == 1
