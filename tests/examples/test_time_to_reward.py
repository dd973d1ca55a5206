"""Seconds to a reward: when a curve reaches it, and what both trainers are timed to and given."""

from __future__ import annotations

import pytest

from benchmarks.time_to_reward import compared, right, seconds_to


def test_a_curve_reaches_a_reward_between_two_measurements():
    curve = [[0, 0.0, 0.5], [10, 4.0, 0.4], [20, 8.0, 0.6], [30, 12.0, 0.7]]
    assert seconds_to(curve, 0.55) == pytest.approx(7.0)  # three quarters of the way from 4 to 8 s
    assert seconds_to(curve, 0.7) == pytest.approx(12.0)
    assert seconds_to(curve, 0.8) is None


def test_both_are_timed_to_the_lowest_last_reward_of_any_run():
    runs = [
        {"trainer": "trl", "seed": 0, "curve": [[10, 20.0, 0.6], [20, 40.0, 0.8]]},
        {"trainer": "mmrl", "seed": 0, "curve": [[10, 5.0, 0.7], [20, 10.0, 0.75]]},
    ]
    found = compared(runs, 0.5)
    assert found["goal"] == 0.75 and found["last"] == {"trl": 0.8, "mmrl": 0.75}
    assert found["seconds_to_goal"] == {"trl": [35.0], "mmrl": [10.0]}
    assert found["seconds_per_step"] == {"trl": 2.0, "mmrl": 0.5}


def test_an_answer_is_right_in_both_forms_of_a_completion():
    talk = [{"role": "assistant", "content": " Red "}]
    assert right([talk, "blue", "blue"], answer=["red", "red", "blue"]) == [1.0, 0.0, 1.0]
