"""From several rewards to one."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import group_center
from mmrl.advantages.shape import pick, total
from tests.support.tables import assert_rows, reward_table


def test_total_adds_weighted_rewards_up():
    table = total(reward_table({"a": [1, 2], "b": [3, 5]}, weights={"a": 2.0, "b": -1.0}))
    # 2 * 1 - 3 and 2 * 2 - 5
    assert_rows(table.values[:, 0], [[-1], [-1]])
    assert table.weights == {"total": 1.0}


def test_a_reward_that_does_not_apply_adds_nothing_and_where_none_does_there_is_no_total():
    table = total(reward_table({"a": [1, None, None], "b": [None, 4, None]}))
    assert_rows(table.values[:, 0], [[1], [4], [0]])
    assert table.valid[:, 0, 0].tolist() == [True, True, False]


def test_what_the_chain_left_where_a_reward_does_not_apply_is_not_added():
    # centring leaves 0 - 1 in the empty place of the second row
    table = total(group_center(reward_table({"a": [2, None, 0], "b": [1, 1, 1]})))
    assert_rows(table.values[:, 0], [[1], [0], [-1]])


def test_total_leaves_labels_and_measured_rewards_alone():
    table = total(reward_table({"a": [1, 2], "label": [9, 9]}, weights={"label": 0.0}))
    assert_rows(table.values[:, 0], [[1], [2]])
    assert table.scored["label"].tolist() == [[9], [9]]


def test_total_of_a_total_is_the_total():
    once = total(reward_table({"a": [1, 2], "b": [3, 5]}, weights={"a": 2.0}))
    assert total(once).values.equal(once.values)


def test_pick_keeps_one_reward_without_its_weight():
    table = pick(reward_table({"a": [1, 2], "b": [3, None]}, weights={"b": 7.0}), of="b")
    assert_rows(table.values[:, 0], [[3], [0]])
    assert table.weights == {"b": 1.0}
    assert table.valid[:, 0, 0].tolist() == [True, False]


def test_pick_of_an_unknown_reward_names_those_there_are():
    with pytest.raises(ValueError, match=r"no reward called 'c' at this place; it has \('a', 'b'\)"):
        pick(reward_table({"a": [1], "b": [2]}), of="c")


def test_pick_keeps_one_reward_of_several():
    table = pick(reward_table({"a": [1, 2], "b": [3, None], "c": [5, 6]}), of="b")
    assert table.values.shape == table.valid.shape == (2, 1, 1)
    assert table.valid[:, 0, 0].tolist() == [True, False]
