"""DaGRPO: which answers are distinct."""

from __future__ import annotations

from mmrl.papers.dagrpo import distinct
from tests.support.tables import reward_table


def kept(table):
    return table.learn[:, 0].tolist()


def test_distinct_drops_what_is_close_to_the_other_side():
    table = reward_table({"right": [1, 1, 0, 0], "fine": [0.9, 0.85, 0.8, 0.2]}, weights={"fine": 0.0})
    assert kept(distinct(table, of="fine", right="right")) == [True, True, False, True]
    assert kept(distinct(table, of="fine", right="right", strict=True)) == [False, False, False, True]


def test_distinct_keeps_groups_without_another_side_and_answers_without_a_score():
    table = reward_table({"right": [1, 1, 0, 1], "fine": [0.9, 0.9, 0.2, None]}, group="aabb")
    assert kept(distinct(table, of="fine", right="right")) == [True] * 4
