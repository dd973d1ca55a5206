"""PRIME: returns of process rewards, and groups of a middle mean."""

from __future__ import annotations

from mmrl.papers.prime import mean_between, process_returns
from tests.support.tables import assert_rows, reward_table

PROCESS = {"prm/logp": [[0.2, -0.1, 0.3], [-0.2, 0.1]], "ref/logp": [[0.0] * 3, [0.0] * 2]}


RETURNS = [1.55, 1.233333, 1.516667], [-1.366667, -0.883333]


def test_process_rewards_are_means_over_the_steps_that_have_one():
    table = reward_table([1, 0], length=[3, 2], notes=PROCESS)
    assert_rows(process_returns(table, coef=1.0).values[:, 0], RETURNS)
    notes = {name: [[row[0], None, None, *row[1:]], rest] for name, (row, rest) in PROCESS.items()}
    found = process_returns(reward_table([1, 0], length=[5, 2], notes=notes), coef=1.0)
    assert_rows(found.values[:1, 0, [0, 3, 4]], RETURNS[:1])
    assert_rows(found.values[1:, 0], RETURNS[1:])
    assert found.valid[0, 0].tolist() == [True, False, False, True, True]


def test_process_returns_add_the_reward_of_the_answer_alone():
    # answers of 1 and 0 among two: (1 * 2 - 1) / 1 and (0 * 2 - 1) / 1; earlier outcomes do not count
    nothing = {name: [[0.0] * 2] * 2 for name in PROCESS}
    table = reward_table([[0, 1], [0, 0]], notes=nothing)
    assert_rows(process_returns(table).values[:, 0], [[1, 1], [-1, -1]])
    table = reward_table([[0, 1], [0]], length=[2, 2], notes=nothing)  # of different numbers of outcomes
    assert_rows(process_returns(table).values[:, 0], [[1, 1], [-1, -1]])


def test_groups_of_a_middle_mean_are_kept():
    # Means 0.25, 0.1 and none.
    table = reward_table([1, 0, 0, 0, 0.2, 0, 0.1, 0.1, None], group="aaaabbbbc")
    assert mean_between(table).tolist() == [True] * 4 + [False] * 5
    assert mean_between(table, low=0.1, high=0.2).tolist() == [False] * 4 + [True] * 4 + [False]
