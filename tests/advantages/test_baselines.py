"""Baselines other than the mean: NGRPO, Pass@k, CANON."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.baselines import (
    best_margin,
    virtual_maximum,
)
from mmrl.advantages.normalize import group_normalize
from tests.support.tables import assert_rows, reward_table


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([0] * 8, [-0.333332] * 8),  # mean 1/9, deviation 1/3
        ([1, 1, *[0] * 6], [1.333331] * 2 + [-0.666665] * 6),  # mean 1/3, deviation 1/2
        ([1] * 8, [0] * 8),
        ([0.4], [0]),
    ],
)
def test_virtual_maximum_counts_a_perfect_answer_in(rewards, wanted):
    assert_rows(virtual_maximum(reward_table(rewards)).values, wanted)


def test_virtual_maximum_with_several_perfect_answers_is_zero_sum_with_them():
    # 0 0 1 1: mean 1/2, squares 1 over 3
    found = virtual_maximum(reward_table([0, 0]), num_virtual=2, eps=0.0)
    assert_rows(found.values, [-0.5 / math.sqrt(1 / 3)] * 2)
    assert_rows(virtual_maximum(reward_table([0.4]), singleton="raw").values, [0.4])


def test_best_margin_gives_the_best_row_its_lead():
    # .4 over the deviation .359398
    found = best_margin(reward_table([0.2, 0.9, 0.5, 0.1]))
    assert_rows(found.values, [0, 1.112970, 0, 0])
    assert_rows(best_margin(reward_table([0.9, 0.9, 0.1])).values, [0, 0, 0])
    assert_rows(best_margin(reward_table([0.9])).values, [0])
    assert_rows(best_margin(reward_table([0.0, 1.0], group="ab")).values, [0, 0])


def test_best_margin_does_not_feel_a_shift_of_the_rewards():
    rewards = torch.rand(9, generator=torch.Generator().manual_seed(1)).tolist()
    table = reward_table(rewards, group="abc" * 3, length=range(1, 10))
    torch.testing.assert_close(best_margin(table.put(table.values + 5)).values, best_margin(table).values)


@pytest.mark.parametrize("piece", [group_normalize, best_margin])
def test_equal_rewards_have_no_advantage_also_where_their_mean_is_rounded(piece):
    assert piece(reward_table([0.1] * 3, length=[1, 2, 4])).values.eq(0).all()
