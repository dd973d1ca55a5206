"""Dynamic sampling: which groups are learned from."""

from __future__ import annotations

import pytest
import torch

from mmrl.filters import keep_all, not_all_right, varied
from mmrl.papers.prime import mean_between
from tests.support.tables import reward_table


def test_keep_all_keeps_every_row():
    assert keep_all(reward_table([1, 1, 1])).tolist() == [True] * 3


def test_varied_drops_groups_whose_answers_earn_the_same():
    table = reward_table([1, 1, 1, 0, 1, 0, 0, 0, 0], group="aaabbbccc")
    assert varied(table).tolist() == [False] * 3 + [True] * 3 + [False] * 3


def test_a_group_of_one_stays():
    assert varied(reward_table([1, 0, 0], group="abb")).tolist() == [True, False, False]


def test_groups_need_not_stand_together():
    assert varied(reward_table([1, 5, 0, 5], group="abab")).tolist() == [True, False, True, False]


def test_of_names_the_reward_that_must_vary():
    table = reward_table({"right": [1, 1, 0, 1], "length": [3, 4, 5, 5]}, group="aabb")
    assert varied(table).tolist() == [True] * 4
    assert varied(table, of="right").tolist() == [False, False, True, True]


def test_of_may_name_a_label():
    table = reward_table({"right": [1, 0], "label": [2, 2]}, weights={"label": 0.0})
    assert varied(table, of="label").tolist() == [False, False]


def test_the_weighted_sum_is_what_varies():
    # 2 - 2 = 1 - 1, although both rewards vary
    table = reward_table({"a": [2, 1], "b": [2, 1]}, weights={"b": -1.0})
    assert varied(table).tolist() == [False, False]


def test_differences_of_rounding_do_not_count():
    assert varied(reward_table([0.3, 0.1 + 0.2])).tolist() == [False, False]


def test_only_answers_count_and_rewards_that_do_not_apply_are_left_out():
    probes = reward_table([[0, 1], [5, 1]])
    assert varied(probes).tolist() == [False, False]
    missing = reward_table([1, None, 0, None, 1, None], group="aaabbb")
    assert varied(missing).tolist() == [True] * 3 + [False] * 3


def test_a_group_to_which_no_reward_applies_is_dropped():
    assert varied(reward_table([None, None, 1, 0], group="aabb")).tolist() == [False, False, True, True]


@pytest.mark.parametrize("group_filter", [keep_all, mean_between, varied])
def test_a_table_without_rows_keeps_none(group_filter):
    kept = group_filter(reward_table([1, 0]).select(torch.tensor([False, False])))
    assert (kept.shape, kept.dtype) == ((0,), torch.bool)


def test_not_all_right_drops_groups_without_a_mistake_and_keeps_those_all_wrong():
    table = reward_table([1, 1, 0, 1, 0, 0, None, None], group="aabbccdd")
    assert not_all_right(table).tolist() == [False, False, True, True, True, True, False, False]
    two = reward_table({"right": [1, 1], "format": [0, 1]})
    assert not_all_right(two, of="right").tolist() == [False, False]
    assert not_all_right(two, max_reward=2.0).tolist() == [True, True]
