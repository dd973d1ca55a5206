"""MARS: the mean of different returns, by worked numbers."""

from __future__ import annotations

from mmrl.advantages.normalize import group_center
from mmrl.advantages.select import returns
from mmrl.papers.mars import unique_center
from tests.support.tables import assert_rows, reward_table


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


def test_mars_counts_equal_returns_of_a_player_once():
    table = played([[0, 1], [0, 0]], role=[["A", "A"], ["A", "A"]])
    centred = group_center(table, by=("role",))
    carried = returns(centred, by=("role",))
    assert_rows(carried.values[:, 0], [[0.5, 0.75], [-0.5, -0.25]])
    found = unique_center(carried, by=("role",)).values[:, 0]
    assert_rows(found, [[0.375, 0.625], [-0.625, -0.375]])
    twice = reward_table([[1, 1], [1, 0]])
    assert_rows(unique_center(twice).values[:, 0], [[0.5, 0.5], [0.5, -0.5]])  # the mean of 1 and 0
