"""The benchmark of lags: what it reads off a journal."""

from __future__ import annotations

import pytest

from benchmarks.lag import described, letters, with_seconds_to


def journal(rewards, seconds):
    times = {"step_time": seconds, "time/rollout": seconds / 2, "time/learn": seconds / 4}
    step = {**times, "sampling/age/mean": 1.5}
    return [{"reward": reward, **step} for reward in rewards]


def test_the_seconds_to_a_goal_are_those_of_the_first_five_steps_that_reach_it():
    exact = described(journal([0.0] * 10 + [1.0] * 10, 2.0), 0, False, 0)
    ahead = described(journal([0.0] * 12 + [1.0] * 8, 1.0), 4, True, 0)
    never = described(journal([0.0] * 20, 1.0), 1, False, 0)
    assert exact["reward"] == 1.0 and exact["step_seconds"] == 2.0 and exact["waiting_seconds"] == 1.0
    assert ahead["age"] == pytest.approx(1.5) and ahead["run_seconds"] == 20.0
    found = [run["seconds_to_goal"] for run in with_seconds_to([exact, ahead, never])]
    # Steps 11 to 15 of two seconds, steps 13 to 17 of one second; 0.9 of the last reward of lag 0.
    assert found == [30.0, 17.0, None]


def test_letters_are_counted_in_tens():
    assert letters([], ["<ab> 12", "abcdefghij"]) == [0.2, 1.0]
