"""A token is drawn from the distribution that was cut as asked, by one number in [0, 1)."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.vision.decoding.decoding import draw_tokens, inverse_cdf

FORBIDDEN = -1e30
SHARES = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)  # by rank: tokens 1, 3, 2, 0


def grid(count):
    """Numbers in the middle of as many equal parts of [0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def drawn(shares, count=1000, **settings):
    """Count the tokens that evenly spaced numbers draw, and look up what was said of each."""
    logits = shares.log().expand(count, -1)
    token, logp, entropy = draw_tokens(logits, grid(count), **settings)
    return torch.bincount(token, minlength=len(shares)), token, logp, entropy


def kept(shares, **settings):
    return set(drawn(shares, **settings)[0].nonzero()[:, 0].tolist())


def test_evenly_spaced_numbers_draw_every_token_as_often_as_its_share():
    counts, token, logp, entropy = drawn(SHARES)
    assert counts.tolist() == [100, 400, 200, 300]
    assert torch.allclose(logp, SHARES.log()[token])
    assert entropy.tolist() == pytest.approx([-float((SHARES * SHARES.log()).sum())] * 1000)


def test_a_temperature_sharpens_or_flattens_the_shares():
    # At 1/2 shares are squared: 1, 16, 4, 9 of 30. At 2 they are roots.
    assert drawn(SHARES, count=3000, temperature=0.5)[0].tolist() == [100, 1600, 400, 900]
    roots = SHARES.sqrt() / SHARES.sqrt().sum()
    counts, token, logp, entropy = drawn(SHARES, count=10000, temperature=2.0)
    assert (counts / 10000 - roots).abs().max() < 2e-4
    assert torch.allclose(logp, roots.log()[token])
    assert entropy[0] == pytest.approx(-float((roots * roots.log()).sum()))


def test_temperature_0_takes_the_likeliest_token_and_tells_its_probability_at_1():
    _, token, logp, entropy = drawn(SHARES, temperature=0)
    assert set(token.tolist()) == {1}
    assert logp.tolist() == pytest.approx([math.log(0.4)] * 1000)
    assert entropy[0] == pytest.approx(-float((SHARES * SHARES.log()).sum()))


def test_top_k_keeps_the_likeliest():
    assert kept(SHARES, top_k=1) == {1}
    assert kept(SHARES, top_k=2) == {1, 3}
    assert kept(SHARES, top_k=4) == kept(SHARES, top_k=9) == kept(SHARES, top_k=0) == {0, 1, 2, 3}
    # 0.4 and 0.3 of 0.7.
    assert drawn(SHARES, count=700, top_k=2)[0].tolist() == [0, 400, 0, 300]


def test_top_p_keeps_tokens_until_their_sum_reaches_it():
    # Sums by rank: 0.4, 0.7, 0.9, 1.0.
    for top_p, tokens in ((0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 3, 2})):
        assert kept(SHARES, top_p=top_p) == tokens
    assert kept(SHARES, top_p=0.91) == {0, 1, 2, 3}


def test_min_p_keeps_what_is_near_the_likeliest():
    # The bar is a share of 0.4: 0.5 of it is 0.2, which token 2 reaches.
    assert kept(SHARES, min_p=0.49) == {1, 2, 3}
    assert kept(SHARES, min_p=0.51) == {1, 3}
    assert kept(SHARES, min_p=0.99) == {1}
    assert kept(SHARES, min_p=0.2) == {0, 1, 2, 3}


def test_cuts_are_made_at_the_temperature_and_together():
    # At 1/2 the sums by rank are 16/30 = 0.533, 25/30.
    assert kept(SHARES, temperature=0.5, top_p=0.5) == {1}
    assert kept(SHARES, temperature=1.0, top_p=0.5) == {1, 3}
    assert kept(SHARES, top_k=3, min_p=0.51) == {1, 3}
    assert kept(SHARES, top_k=1, top_p=0.9) == {1}


def test_log_probabilities_are_those_of_the_cut_distribution_and_entropies_those_before():
    _, token, logp, entropy = drawn(SHARES, count=700, top_k=2)
    assert torch.allclose(logp[token == 1], torch.tensor(math.log(4 / 7), dtype=torch.float64))
    assert torch.allclose(logp[token == 3], torch.tensor(math.log(3 / 7), dtype=torch.float64))
    assert entropy[0] == pytest.approx(-float((SHARES * SHARES.log()).sum()))


def test_a_forbidden_token_is_never_drawn():
    logits = torch.tensor([[FORBIDDEN, 0.0, FORBIDDEN, 0.0, FORBIDDEN]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-24, 0.9999])
    for settings in ({}, {"temperature": 3.0}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.01}):
        token, logp, entropy = draw_tokens(logits, uniform, **settings)
        assert token.tolist() == [1, 3, 3, 3]
        assert logp.tolist() == pytest.approx([math.log(0.5)] * 4)
        assert entropy.tolist() == pytest.approx([math.log(2)] * 4)
    assert draw_tokens(logits, uniform, temperature=0)[0].tolist() == [1, 1, 1, 1]


def test_a_row_depends_on_its_own_number_and_logits_alone():
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(6, 50, generator=generator), torch.rand(6, generator=generator)
    together = draw_tokens(logits, uniform, top_p=0.9)[0]
    alone = [int(draw_tokens(logits[i : i + 1], uniform[i : i + 1], top_p=0.9)[0]) for i in range(6)]
    assert together.tolist() == alone


def test_inverse_cdf_at_its_edges():
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for number, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.9999999, 3), (1.0, 3)):
        assert inverse_cdf(shares, torch.tensor([number])).item() == token


def test_inverse_cdf_survives_sums_that_rounding_leaves_below_or_above_1():
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(8, 150_000, generator=generator).softmax(-1)
    shares[:, -3:] = 0
    token = inverse_cdf(shares, torch.full((8,), 1 - 2**-24))
    assert (shares.gather(1, token[:, None]) > 0).all()
    assert (token > 149_000).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"temperature": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}.* must be"):
        Pieces(Stream(0)).check("engine", Piece("vision.generate", settings))
