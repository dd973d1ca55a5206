"""TTRL: the first answers of a group are learned from."""

from __future__ import annotations

from mmrl.advantages.normalize import group_normalize
from mmrl.papers.ttrl import keep_first
from tests.support.tables import assert_rows, reward_table


def kept(table):
    return table.learn[:, 0].tolist()


def test_keep_first_compares_the_first_rows_of_a_group_alone():
    table = keep_first(reward_table([9, 1, 0, 0, 5, 7], group="baaabb"), keep=2)
    assert kept(table) == [True, True, True, False, True, False]
    assert_rows(group_normalize(table, eps=0.0).values[1:3, 0, 0], [0.707107, -0.707107])
    assert kept(keep_first(reward_table([1, 0]), keep=5)) == [True, True]
