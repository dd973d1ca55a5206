"""IGPO: the rise of the right answer's probability, by worked numbers."""

from __future__ import annotations

from mmrl.advantages.normalize import group_center
from mmrl.advantages.select import returns
from mmrl.papers.igpo_turns import information_gain
from tests.support.tables import assert_rows, reward_table


def test_information_gain_rewards_the_rise_of_the_right_answer():
    table = reward_table(
        {"f1": [[None, None, 1], [None, None, 0]], "p": [[0.1, 0.3, 0.6], [0.1, 0.2, 0.15]]},
        weights={"p": 0.0},
        tags={"turn": [list("012")] * 2},
    )
    gained = information_gain(table, of="p")
    assert_rows(gained.values[:, 0], [[0.2, 0.3, 1], [0.1, -0.05, 0]])
    carried = returns(gained)
    assert_rows(carried.values[:, 0], [[1.5, 1.3, 1], [0.05, -0.05, 0]])
    assert_rows(group_center(carried).values[:, 0], [[0.725, 0.675, 0.5], [-0.725, -0.675, -0.5]])
