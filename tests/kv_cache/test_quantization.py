"""Packing, ranges and codes, by numbers that can be checked in the head."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch.testing import assert_close

from mmrl.kv_cache import quantization


@pytest.mark.parametrize("nbits", quantization.BITS)
@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 13])
def test_what_is_packed_comes_out_again(nbits, size, generator):
    codes = torch.randint(0, 2**nbits, (3, 5, size), generator=generator, dtype=torch.uint8)
    packed = quantization.pack(codes, nbits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, -(-size * nbits // 8))
    assert torch.equal(quantization.unpack(packed, nbits, size), codes)


def test_the_first_code_stands_in_the_highest_bits():
    # 1 0 1 1 0 0 0 0 is 128 + 32 + 16; 3 0 2 1 is 3 * 64 + 2 * 4 + 1; 10 5 is 160 + 5
    for codes, nbits, byte in (([1, 0, 1, 1, 0, 0, 0, 0], 1, 176), ([3, 0, 2, 1], 2, 201), ([10, 5], 4, 165)):
        assert quantization.pack(torch.tensor(codes), nbits).tolist() == [byte]
    # Three codes of one bit fill their byte with zeros.
    assert quantization.pack(torch.tensor([1, 1, 1]), 1).tolist() == [0b11100000]


@pytest.mark.parametrize("nbits", [0, 3, 16])
def test_bits_that_do_not_exist_are_refused(nbits):
    with pytest.raises(ValueError, match=f"must be one of 1, 2, 4, 8, not {nbits}"):
        quantization.quantize(torch.zeros(2, 8), nbits)


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def back(x, nbits, **options):
    return quantization.dequantize(quantization.quantize(x, nbits, **options))[:, 0].tolist()


def test_range_is_from_the_least_to_the_largest():
    # scale (3 - 0) / 3 = 1: codes 0 1 2 3; 1.4 goes to 1, and 0.5 and 1.5 tie to the even codes 0 and 2
    assert back(column(0, 1.4, 2, 3), 2) == [0, 1, 2, 3]
    assert back(column(0, 0.5, 1.5, 3), 2) == [0, 0, 2, 3]
    # on both sides of zero, and in float64 throughout
    assert back(column(-3, 3), 1) == [-3, 3] and back(column(0, 1 / 3), 1) == [0, 1 / 3]
    for nbits in quantization.BITS:
        assert back(column(*range(2**nbits)), nbits) == list(range(2**nbits))


def test_a_range_below_a_millionth_is_a_constant():
    assert back(column(0, 0.5e-6), 1) == [0, 0]
    assert back(column(0, 1.5e-6), 1) == [0, 1.5e-6]
    # a scale that is 0 in half precision is that of a constant, too
    tiny = torch.tensor([[0.0], [5e-6]], dtype=torch.float16)
    assert quantization.dequantize(quantization.quantize(tiny, 8))[:, 0].tolist() == [0, 0]


def test_shrunk_is_calibquant_at_one_bit():
    # keys: 0.5 * -2 and 0.5 * 4 are the two values, 0.5 between them ties to code 0
    assert back(column(-2, 0.5, 0.51, 4), 1, rule="shrunk") == [-1, -1, 2, 2]
    # values: 0.3 * -2 and 0.3 * 4, the border is 0.3
    assert back(column(-2, 0.2, 4), 1, rule="shrunk", side="values") == pytest.approx([-0.6, -0.6, 1.2])
    # far from zero everything falls to one side: all of [9, 11] becomes 5.5
    assert back(column(9, 10, 11), 1, rule="shrunk") == [5.5, 5.5, 5.5]
    # at more bits nothing is shrunk
    assert back(column(0, 1, 2, 3), 2, rule="shrunk") == [0, 1, 2, 3]


def test_centred_shrinks_towards_the_middle():
    # 10 -+ 0.5 * 1: the mean of an offset channel survives
    assert back(column(9, 10.5, 11), 1, rule="centred") == [9.5, 10.5, 10.5]
    # 10 -+ 0.5 * 2, the border is 10
    assert back(column(8, 11, 12), 1, rule="centred") == [9, 11, 11]


def test_quantile_cuts_a_fifth_off_either_end():
    # of 0 1 2 3 4 5 the places are 0.2 * 5 = 1 and 0.8 * 5 = 4; 2.5 between them is the border
    assert back(column(0, 1, 2, 3, 4, 5), 1, rule="quantile") == [1, 1, 1, 4, 4, 4]
    # between two numbers: 0.2 * 2 = 0.4 of the way from 0 to 10, and 0.6 from 10 to 20
    assert back(column(0, 10, 20), 1, rule="quantile") == [4, 4, 16]
    assert back(column(0, 1, 2, 3), 2, rule="quantile") == [0, 1, 2, 3]


def test_quantile_is_that_of_torch(generator):
    x = torch.randn(3, 17, 5, generator=generator, dtype=torch.float64)
    valid = torch.rand(3, 17, 1, generator=generator) > 0.3
    expected = torch.nanquantile(x.masked_fill(~valid, torch.nan), 0.2, 1, keepdim=True)
    assert_close(quantization.quantile(x, valid.expand(x.shape), 1, 0.2), expected)


def test_fitted_finds_the_two_means():
    # two heaps around 1 and 5: their means
    assert back(column(0, 1, 2, 4, 5, 6), 1, rule="fitted") == pytest.approx([1, 1, 1, 5, 5, 5])
    # keys of more bits keep their range, values do not: one far number must not cost all others their codes
    assert back(column(0, 1, 2, 3), 2, rule="fitted") == [0, 1, 2, 3]
    assert back(column(0, 1, 2, 30), 2, rule="fitted") == [0, 0, 0, 30]


@pytest.mark.parametrize("nbits", quantization.BITS)
def test_fitted_levels_are_those_of_six_least_squares_lines(nbits, generator):
    # channel by channel with numpy; the levels at the start are those of a Gaussian, within the range
    x = torch.randn(2, 90, 3, generator=generator, dtype=torch.float64) ** 3 + torch.tensor([0.0, 5.0, -3.0])
    valid = (torch.rand(2, 90, 1, generator=generator) > 0.3).expand(x.shape)
    least = x.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    most = x.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    low, high = quantization.fit(x, valid, 1, nbits, least, most)
    reach = {1: 0.798, 2: 1.494, 4: 2.514, 8: 3.927}[nbits]
    for row in range(2):
        for channel in range(3):
            data = x[row, valid[row, :, channel], channel].numpy()
            first = max(data.mean() - reach * data.std(), data.min())
            last = min(data.mean() + reach * data.std(), data.max())
            for _ in range(6):
                codes = numpy.clip((data - first) / (last - first) * (2**nbits - 1), 0, 2**nbits - 1).round()
                slope, first = numpy.polyfit(codes, data, 1)
                last = first + slope * (2**nbits - 1)
            assert low[row, 0, channel].item() == pytest.approx(first, abs=1e-9)
            assert high[row, 0, channel].item() == pytest.approx(last, abs=1e-9)


@pytest.mark.parametrize("nbits", [1, 2, 4])
def test_fitted_errs_less_than_every_published_rule(nbits, generator):
    x = torch.randn(2000, 16, generator=generator, dtype=torch.float64) + 2 * torch.arange(16)
    error = {
        rule: (quantization.dequantize(quantization.quantize(x, nbits, rule=rule, side="values")) - x)
        .square()
        .mean()
        .item()
        for rule in ("shrunk", "centred", "quantile", "range", "fitted")
    }
    assert min(error, key=error.get) == "fitted"
    if nbits == 1:
        # The best two levels of a Gaussian leave 1 - 2 / pi = 0.363 of its variance.
        assert error["fitted"] == pytest.approx(0.363, abs=0.01)


@pytest.mark.parametrize("rule", quantization.Rule.__args__)
@pytest.mark.parametrize("nbits", quantization.BITS)
def test_a_constant_channel_and_a_single_token_come_back(rule, nbits):
    assert back(column(7, 7, 7), nbits, rule=rule) == [7, 7, 7]
    assert back(column(-3), nbits, rule=rule) == [-3]


@pytest.mark.parametrize("rule", quantization.Rule.__args__)
def test_tokens_that_do_not_count_touch_nothing(rule, generator):
    x = torch.randn(9, 8, generator=generator)
    valid = torch.tensor([True] * 6 + [False] * 3)[:, None]
    other = torch.where(valid, x, 1e6)
    alone = quantization.dequantize(quantization.quantize(x[:6], 1, rule=rule))
    assert_close(quantization.dequantize(quantization.quantize(other, 1, rule=rule, valid=valid))[:6], alone)
    none = quantization.quantize(x, 1, rule=rule, valid=torch.zeros(9, 1, dtype=torch.bool))
    assert not quantization.dequantize(none).any()
    assert not quantization.unpack(quantization.quantize(other, 1, rule=rule, valid=valid).packed, 1, 8)[
        6:
    ].any()


def test_a_token_may_have_scales_of_its_own():
    # two groups of two channels: 0 and 3 in codes 0 3; 10 and 40 as well
    x = torch.tensor([[0.0, 3.0, 10.0, 40.0], [1.0, 1.0, -2.0, 1.0]])
    codes = quantization.quantize(x, 2, channels=2)
    assert codes.by_token
    assert codes.scale.tolist() == [[1, 10], [1, 1]]
    assert codes.low.tolist() == [[0, 10], [1, -2]]
    assert_close(quantization.dequantize(codes), x)
    assert_close(quantization.dequantize(quantization.quantize(x[[0, 1, 0]], 2, channels=2)), x[[0, 1, 0]])
    with pytest.raises(ValueError, match="groups of 3 channels do not divide a head of size 4"):
        quantization.quantize(x, 2, channels=3)


def test_bytes_are_those_of_the_formula(generator):
    # N = 256 tokens at one bit: 1 + 32 / 256 = 1.125 bits a number with scales of 16 bits
    codes = quantization.quantize(torch.randn(256, 64, generator=generator, dtype=torch.bfloat16), 1)
    assert codes.nbytes * 8 / (256 * 64) == 1.125


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_scales_are_those_that_codes_were_chosen_for(dtype, generator):
    x = (torch.randn(64, 8, generator=generator) + 100).to(dtype)
    error = (quantization.dequantize(quantization.quantize(x, 8)).float() - x.float()).abs().max()
    assert error <= 1.0  # steps of bfloat16 at 100 are half of one


@pytest.mark.parametrize("size", [1, 8, 64, 80, 96])
def test_a_rotation_turns_back(size):
    turn = quantization.rotation(size, torch.float64, torch.device("cpu"))
    assert_close(turn @ turn, torch.eye(size, dtype=torch.float64))
    assert_close(turn, turn.T)
    # 64 channels share one outlier: 8 / sqrt(64) each
    if size == 64:
        assert_close((8 * turn[0]).abs(), torch.ones(64, dtype=torch.float64))


def test_calibration_lowers_the_largest_score_by_three():
    # from [0, 6] to [0, 3]: half the slope. The last number does not count
    scores = torch.tensor([0.0, 2.0, 6.0, 9.0])
    valid = torch.tensor([True, True, True, False])
    assert_close(quantization.calibrate(scores, valid), torch.tensor([0.0, 1.0, 3.0, 9.0]))


def test_calibration_turns_no_order_around():
    # a span of 2 is less than 3: the published slope is (2 - 3) / 2
    scores, valid = torch.tensor([1.0, 3.0]), torch.ones(2, dtype=torch.bool)
    assert_close(quantization.calibrate(scores, valid), torch.tensor([1.0, 1.0]))
    assert_close(quantization.calibrate(scores, valid, guard=False), torch.tensor([1.0, 0.0]))
    assert_close(quantization.calibrate(scores, torch.zeros(2, dtype=torch.bool)), scores)


def test_calibration_is_by_query():
    scores = torch.tensor([[0.0, 6.0], [0.0, 12.0]])
    valid = torch.ones(2, dtype=torch.bool)
    assert_close(quantization.calibrate(scores, valid), torch.tensor([[0.0, 3.0], [0.0, 9.0]]))


def test_scales_too_small_for_their_precision_do_not_divide_by_zero():
    # A range of 2e-6 in 255 steps is 8e-9, which float16 rounds to 0.
    x = torch.tensor([[0.0], [2e-6]], dtype=torch.float16)[None]
    codes = quantization.quantize(x, 8)
    assert (codes.scale == 1).all()
    assert torch.equal(quantization.dequantize(codes), torch.zeros_like(x))
