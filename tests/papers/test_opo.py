"""OPO: the length-weighted mean as baseline, by worked numbers."""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import group_center
from mmrl.papers.opo import length_baseline
from tests.support.tables import assert_rows, reward_table


def test_length_baseline_weighs_rewards_by_length():
    # (10 + 30) / 100
    table = reward_table([1, 0, 1, 0], length=[10, 20, 30, 40])
    assert_rows(length_baseline(table).values, [0.6, -0.4, 0.6, -0.4])


def test_length_baseline_of_equal_lengths_is_the_mean_and_an_empty_answer_counts_as_one_step():
    table = reward_table([1, 0, 0, 0], length=[3] * 4)
    assert_rows(length_baseline(table).values, group_center(table).values.flatten().tolist())
    assert_rows(length_baseline(reward_table([1, 0], length=[0, 3])).values, [0.75, -0.25])


def test_a_shift_of_the_rewards_changes_nothing():
    rewards = torch.rand(9, generator=torch.Generator().manual_seed(1)).tolist()
    table = reward_table(rewards, group="abc" * 3, length=range(1, 10))
    torch.testing.assert_close(
        length_baseline(table.put(table.values + 5)).values, length_baseline(table).values
    )


def test_equal_rewards_have_no_advantage_also_where_their_mean_is_rounded():
    assert length_baseline(reward_table([0.1] * 3, length=[1, 2, 4])).values.eq(0).all()
