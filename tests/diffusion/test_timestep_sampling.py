"""Times of matching: strata of the schedule, and spreads over all times."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.schedule import TIME_TYPES, TimeRange, shift_times, strata
from tests.diffusion.flows import sd3_times, unshift_times

FOURTEEN = sd3_times(14).float()
NOTHING = torch.zeros(0)


def drawn(kind, schedule=FOURTEEN, draws=6, row=0, collection=0, **options):
    """Draw with generators of a row and of a collection."""
    mine, all_rows = (torch.Generator().manual_seed(seed) for seed in (row, 1000 + collection))
    usual = {"fraction": 0.9, "shift": 3.0, "lowest": 0.2}
    return TIME_TYPES[kind](TimeRange(draws, **{**usual, **options}), schedule, mine, all_rows)


def places(times, schedule=FOURTEEN):
    """Find which times of a schedule were drawn."""
    return [(schedule == time).nonzero()[0].item() for time in times]


@pytest.mark.parametrize(
    ("start", "draws", "lower", "upper"),
    [
        (1, 6, [1, 2, 4, 6, 8, 10], [2, 4, 6, 8, 10, 12]),
        (0, 6, [0, 2, 4, 6, 8, 10], [2, 4, 6, 8, 10, 12]),
        (1, 5, [1, 3, 5, 7, 9], [3, 5, 7, 9, 12]),
    ],
)
def test_the_published_strata(start, draws, lower, upper):
    # 14 steps of which int(14 * .9) = 12 are drawn from; ends are whole parts of linspace(start, 12)
    found = strata(start, 12, draws)
    assert [ends.tolist() for ends in found] == [lower, upper]


def test_no_stratum_is_empty_and_all_are_next_to_each_other():
    for start in (0, 1):
        for stop in range(start + 1, 60):
            for draws in range(1, stop - start + 1):
                lower, upper = strata(start, stop, draws)
                assert lower[0] == start and upper[-1] == stop
                assert torch.equal(lower[1:], upper[:-1])
                assert (upper > lower).all(), (start, stop, draws)


@pytest.mark.parametrize(
    ("kind", "lower", "upper"),
    [
        ("discrete_wo_init", [1, 2, 4, 6, 8, 10], [2, 4, 6, 8, 10, 12]),
        ("discrete", [0, 2, 4, 6, 8, 10], [2, 4, 6, 8, 10, 12]),
        ("discrete_with_init", [0, 1, 3, 5, 7, 9], [1, 3, 5, 7, 9, 12]),
    ],
)
def test_a_discrete_time_is_drawn_from_every_stratum(kind, lower, upper):
    seen = [set() for _ in lower]
    for collection in range(200):
        for found, place in zip(seen, places(drawn(kind, collection=collection)), strict=True):
            found.add(place)
    # Every place of a stratum comes up, and none outside; 12 and 13 are behind the share that is drawn.
    assert [sorted(found) for found in seen] == [
        list(range(*ends)) for ends in zip(lower, upper, strict=True)
    ]


@pytest.mark.parametrize("kind", ["discrete", "discrete_wo_init", "discrete_with_init", "logit_normal"])
def test_rows_of_a_collection_share_these_times(kind):
    assert torch.equal(drawn(kind, row=1), drawn(kind, row=2))
    assert not torch.equal(drawn(kind, collection=1), drawn(kind, collection=2))


def test_uniform_times_are_the_rows_own_one_per_stratum_in_any_order():
    orders = set()
    for row in range(50):
        times = drawn("uniform", NOTHING, 4, row=row)
        assert torch.equal(times, drawn("uniform", NOTHING, 4, row=row, collection=5))
        # Before the shift they lie in the quarters of [.2, 1].
        quarter = (unshift_times(times, 3.0) - 0.2) / 0.8 * 4
        assert sorted(quarter.long().tolist()) == [0, 1, 2, 3]
        orders.add(tuple(quarter.long().tolist()))
    assert len(orders) > 10


def test_uniform_times_keep_to_their_bounds():
    times = torch.cat([drawn("uniform", NOTHING, 6, row=row, lowest=0.5, shift=1.0) for row in range(200)])
    assert 0.5 <= times.min() < 0.51
    assert 0.99 < times.max() <= 1
    assert_close(drawn("uniform", NOTHING, shift=3.0), shift_times(drawn("uniform", NOTHING, shift=1.0), 3.0))


def test_logit_normal_times_are_strata_of_a_normal():
    for collection in range(50):
        times = drawn("logit_normal", NOTHING, 4, collection=collection).double()
        assert times.diff().gt(0).all()
        quantile = torch.special.ndtr(unshift_times(times, 3.0).logit())
        assert quantile.mul(4).long().tolist() == [0, 1, 2, 3]
    # The smallest quantile of 2000 is about 1 in 4000, -3.5 deviations: a sigmoid of .03, before any shift.
    many = drawn("logit_normal", NOTHING, 2000, shift=0.1)
    assert many.min() == pytest.approx(0.01)
    assert many.dtype == torch.float32
    middle = drawn("logit_normal", NOTHING, 2001, shift=1.0)[1000]
    assert float(middle) == pytest.approx(0.5, abs=1e-3)


def test_a_single_draw():
    assert drawn("discrete_with_init", draws=1).tolist() == [1.0]
    assert 1 <= places(drawn("discrete_wo_init", draws=1))[0] < 12
    assert len(drawn("uniform", NOTHING, 1)) == len(drawn("logit_normal", NOTHING, 1)) == 1


def test_as_many_draws_as_there_are_places():
    # int(14 * .9) - 1 = 11 places from 1 to 11, one stratum each; with all of the schedule 13
    assert places(drawn("discrete_wo_init", draws=11)) == list(range(1, 12))
    assert places(drawn("discrete_wo_init", draws=13, fraction=1.0)) == list(range(1, 14))


@pytest.mark.parametrize("kind", ["discrete", "discrete_wo_init", "discrete_with_init"])
def test_recorded_images_have_no_schedule_to_draw_from(kind):
    for draws in (1, 6):
        with pytest.raises(ValueError, match="recorded images have none; set `time_type: uniform`"):
            drawn(kind, NOTHING, draws)


def test_more_draws_than_steps_are_refused():
    with pytest.raises(ValueError, match=r"12 draws want as many strata, but 14 denoising steps leave 11 "):
        drawn("discrete_wo_init", draws=12)


@pytest.mark.parametrize("kind", sorted(TIME_TYPES))
def test_all_times_lie_between_data_and_noise(kind):
    times = drawn(kind)
    assert times.shape == (6,)
    assert times.dtype == torch.float32
    assert (times > 0).all() and (times <= 1).all()
    assert math.isfinite(times.sum())
