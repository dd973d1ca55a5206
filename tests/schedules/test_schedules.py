"""Numbers that follow the clock."""

from __future__ import annotations

import math

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.ranges import PositiveInt
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from mmrl.schedules import constant, cosine, ema_warmup, linear, periodic, ramp, sliding_window


def along(schedule, moments, **options):
    return [schedule(Clock(step), **options) for step in moments]


def test_constant_stays():
    assert along(constant, [0, 7, 1000], value=0.3) == [0.3] * 3


def test_linear_goes_in_a_straight_line_and_stays():
    assert along(linear, [0, 1, 2, 4, 9], start=0.0, end=8.0, steps=4) == [0, 2, 4, 8, 8]


def test_cosine_goes_along_half_a_cosine_and_stays():
    # halfway it is in the middle; after a quarter cos(pi / 4) of the half-width is left above the middle
    values = along(cosine, [0, 1, 2, 4, 9], start=1.0, end=0.0, steps=4)
    assert values == pytest.approx([1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0, 0])


def test_siri_budget_is_half_a_period_of_a_cosine():
    # 12288 + 4096 cos(2 pi t / 640) at t = 0 80 160 320
    values = along(cosine, [0, 80, 160, 320], start=16384.0, end=8192.0, steps=320)
    assert values == pytest.approx([16384, 15184.309376, 12288, 8192])


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_equal_ends_never_move(schedule):
    assert along(schedule, range(5), start=2.0, end=2.0, steps=3) == [2.0] * 5


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_no_steps_begin_at_the_start_and_are_done_afterwards(schedule):
    assert along(schedule, [0, 1], start=1.0, end=3.0, steps=0) == [1.0, 3.0]


def test_warm_up_rises_to_the_value_and_never_begins_at_0():
    assert along(constant, [0, 1, 3, 4, 9], value=8.0, warmup_steps=4) == [2, 4, 8, 8, 8]


def test_a_warm_up_below_1_is_a_share_of_the_run():
    # 0.25 of 16 steps are 4
    values = [constant(Clock(step, max_steps=16), value=8.0, warmup_steps=0.25) for step in (0, 1, 3, 9)]
    assert values == [2, 4, 8, 8]


def test_warm_up_multiplies_what_the_schedule_says():
    # step 1 of 4: three quarters of the way down from 8 to 0 are left, times 2 of 4 steps warm
    assert along(linear, [1], start=8.0, end=0.0, steps=4, warmup_steps=4) == [3.0]
    assert along(cosine, [1], start=8.0, end=8.0, steps=4, warmup_steps=4) == [4.0]


# ---- decays of moving averages


def test_awm_decay_is_a_straight_line_to_three_tenths():
    # min(.3, .001 step)
    assert along(linear, [0, 100, 300, 1000], start=0.0, end=0.3, steps=300) == pytest.approx(
        [0, 0.1, 0.3, 0.3]
    )
    assert along(ramp, [0, 100, 300, 1000], slope=0.001, limit=0.3) == pytest.approx([0, 0.1, 0.3, 0.3])


def test_ramp_waits_rises_and_stays():
    # type 1 of DiffusionNFT is min(.5, .001 step), type 2 is min(.999, .0075 (step - 75)), type 0 is always 0
    assert along(ramp, [0, 250, 500, 900], slope=0.001, limit=0.5) == [0, 0.25, 0.5, 0.5]
    second = along(ramp, [0, 75, 100, 300], slope=0.0075, limit=0.999, delay=75)
    assert second == pytest.approx([0, 0, 0.1875, 0.999])
    assert along(constant, [0, 300], value=0.0) == [0, 0]


def test_settling_rises_to_its_limit():
    # min((1 + n) / (10 + n), .9): 1/10, 10/19, 81/90, and no more
    assert along(ema_warmup, [0, 9, 80, 500]) == pytest.approx([0.1, 10 / 19, 0.9, 0.9])


# ---- the sliding window of MixGRPO


def test_staircase_climbs_and_begins_anew():
    values = along(sliding_window, [0, 24, 25, 500, 524, 525, 550], every=25, stop=20)
    assert values == [0, 0, 1, 20, 20, 0, 1]


def test_staircase_stays_at_the_top_on_request():
    assert along(sliding_window, [0, 2, 4, 6, 99], start=3, every=2, stop=5, roll_back=False) == [
        3,
        4,
        5,
        5,
        5,
    ]


def test_staircase_of_wider_steps_never_leaves_its_range():
    # 1 3 5, and 7 would be above 6
    assert along(sliding_window, range(5), start=1, step=2, every=1, stop=6) == [1, 3, 5, 1, 3]
    assert along(sliding_window, range(3), start=2, every=1, stop=2) == [2, 2, 2]


def test_a_linear_decay_leaves_later_stairs_sooner():
    # from 10 to 1 over 0 to 4: 10, 7.75, 5.5, 3.25 and 1, rounded down
    options = {"every": 10, "stop": 4, "decay": "linear"}
    steps = [0, 9, 10, 16, 17, 21, 22, 24, 25, 26]
    assert along(sliding_window, steps, **options) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 0]
    assert along(sliding_window, [25, 26, 99], **options, roll_back=False) == [4, 4, 4]
    # never below `least`, 6: 10, 9, 8, 7, 6
    assert along(sliding_window, [9, 10, 18, 19, 34, 39, 40], **options, least=6) == [0, 1, 1, 2, 4, 4, 0]


def test_an_exponential_decay_begins_above_a_stair_and_rounds_up():
    # 5 up to stair 2, then 5 e^-.5 = 3.03 and 5 e^-1 = 1.84
    options = {"every": 5, "stop": 4, "decay": "exponential", "rate": 0.5, "after": 2}
    assert along(sliding_window, [4, 5, 14, 15, 18, 19, 20, 21], **options) == [0, 1, 2, 3, 3, 4, 4, 0]


@pytest.mark.parametrize("name", ["every", "step", "least"])
def test_staircase_refuses_what_does_not_climb(name):
    with pytest.raises(ValueError, match="`sliding_window` climbs"):
        sliding_window(Clock(0), stop=-1)
    with pytest.raises(ConfigError, match=f"'schedule.{name}' must be at least 1"):
        Pieces(Stream()).check("schedule", Piece("sliding_window", {"stop": 5, name: 0}), "schedule")


# ---- lengths that come and go


def test_siri_swings_between_two_lengths():
    ends = {"low": 8192, "high": 16384, "period": 640}
    wanted = [16384, 15184.309376, 12288, 8192, 12288, 16384]
    assert along(periodic, [0, 80, 160, 320, 480, 640], **ends) == pytest.approx(wanted)
    steps = [0, 80, 120, 160, 240, 320, 400, 440, 480, 560]
    wanted = [16384, 16384, 15184.309376, 12288, 8192, 8192, 8192, 9391.690624, 12288, 16384]
    assert along(periodic, steps, **ends, form="stair_cosine") == pytest.approx(wanted)
    wanted = [16384, 16384, 8192, 8192, 16384]
    assert along(periodic, [0, 319, 320, 639, 640], **ends, form="stairs") == wanted


def test_siri_gives_whole_lengths_and_checks_its_ends():
    with pytest.raises(ConfigError, match="'schedule.low' must be at most 'high'"):
        Pieces(Stream()).check("schedule", Piece("periodic", {"low": 3, "high": 2}), "schedule")
    number = Pieces(Stream()).number({"name": "periodic", "low": 8192, "high": 16384}, PositiveInt, "length")
    assert number(Clock(80)) == 15184
