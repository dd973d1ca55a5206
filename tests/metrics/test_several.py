"""Metrics of several answers, turns and roles."""

from __future__ import annotations

import math

import pytest

from mmrl.metrics import pairwise_accuracy, pass_at, runs_for, runs_needed, turns, win_rate
from tests.support.tables import reward_table


def test_pass_at_k_is_the_worked_one():
    table = reward_table([1] * 4 + [0] * 6)
    found = pass_at(table, of="reward", k=(1, 3, 5))
    assert [found[f"pass@{k}"] for k in (1, 3, 5)] == pytest.approx([0.4, 0.833333, 0.976190], abs=1e-6)
    found = pass_at(table, of="reward", k=(1, 2, 3))
    assert [found[f"pass^{k}"] for k in (1, 2, 3)] == pytest.approx([0.4, 0.133333, 0.033333], abs=1e-6)


def test_prompts_are_averaged_and_too_few_answers_are_left_out():
    table = reward_table([1, 0, 1, 1, None, 0], group="aabbcc")
    found = pass_at(table, of="reward", k=(1, 2, 3), label="x")
    assert found["x/pass@1"] == pytest.approx(0.5)  # of 1/2, 1 and 0
    assert (found["x/pass@2"], found["x/pass^2"]) == (1.0, 0.5)  # c has one answer only
    assert math.isnan(found["x/pass@3"]) and math.isnan(found["x/pass^3"])


def test_the_runs_of_a_difference_are_the_worked_ones():
    assert runs_for(2.0, 1.5) == pytest.approx(8.829990, abs=1e-6)
    assert runs_for(1.0, 1.5) == pytest.approx(35.319959, abs=1e-6)


def test_answers_of_one_number_are_a_run():
    # Two runs of two prompts with the means 1/2 and 1: their deviation is sqrt(1/8)
    table = reward_table([0, 1, 1, 1], group="aabb")
    found = runs_needed(table, of="reward", difference=0.25)
    assert found["run_std"] == pytest.approx(0.125**0.5)
    assert found["runs_needed"] == math.ceil(15.697760 * 0.125 / 0.0625)
    assert math.isnan(runs_needed(reward_table([1]), of="reward", difference=1.0)["runs_needed"])


def test_games_are_won_by_role():
    table = reward_table(
        {"payoff": [[1, -1], [0, 0], [-1, 1], [2, -2]]},
        tags={"role": [["spy", "c"]] * 4, "turn": [["0", "1"]] * 4},
    )
    assert win_rate(table, of="payoff", where={"role": "spy"}) == {"win_rate": 0.625}
    assert win_rate(table, of="payoff", where={"role": "c"}) == {"win_rate": 0.375}
    with pytest.raises(ValueError, match="no outcome has the tag 'team'"):
        win_rate(table, of="payoff", where={"team": "a"})


def test_turns_and_their_share_of_the_steps_are_counted():
    table = reward_table(
        [[0, 0, 1], [1]],
        ends=[[2, 3, 6], [4]],
        tags={"role": [["a", "b", "a"], ["b"]], "turn": [["0", "1", "2"], ["0"]]},
    )
    assert turns(table) == {"turns": 2.0, "turns/share": 1.0}
    assert turns(table, where={"role": "a"}) == {"turns": 1.0, "turns/share": 0.5}


def test_pairs_are_ordered_as_another_reward_orders_them():
    # The first pair is right, the second wrong by an equal score; c is a tie, and d has no score.
    table = reward_table(
        {"score": [2, 1, 3, 3, 0, 1, None, 1], "truth": [1, 0, 0, 1, 1, 1, 0, 1]}, group="aabbccdd"
    )
    assert pairwise_accuracy(table, of="score", truth="truth") == {"accuracy/score": 0.5}
    # All three pairs of a group of three count: 3 > 1 and 3 > 2 are right, 2 > 1 is not.
    table = reward_table({"score": [1, 0, 5], "truth": [1, 2, 3]}, group="aaa")
    assert pairwise_accuracy(table, of="score", truth="truth", label="x")["x"] == pytest.approx(2 / 3)
    none = reward_table({"score": [1], "truth": [1]})
    assert math.isnan(pairwise_accuracy(none, of="score", truth="truth", label="x")["x"])
