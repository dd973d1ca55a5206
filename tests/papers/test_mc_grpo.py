"""MC-GRPO: the median of a group as baseline, by worked numbers."""

from __future__ import annotations

import torch

from mmrl.papers.mc_grpo import group_median
from tests.support.tables import assert_rows, reward_table


def test_group_median_divides_by_the_median_deviation_and_drops_the_pivot():
    # median .5; deviations .5 .3 0 .4 .5, whose median is .4: .5 / .401 and .3 / .401
    table = group_median(reward_table([0, 0.2, 0.5, 0.9, 1]))
    assert_rows(table.values, [-1.246883, -0.748130, 0, 0.997506, 1.246883])
    assert table.learn[:, 0].tolist() == [True, True, False, True, True]
    kept = group_median(reward_table([0, 0.2, 0.5, 0.9, 1]), drop_pivot=False)
    assert kept.learn.all() and kept.values.equal(table.values)


def test_a_majority_of_equal_rewards_makes_advantages_of_one_over_the_floor():
    table = group_median(reward_table([1, 0, 0, 0, 1]))
    assert_rows(table.values, [1000, 0, 0, 0, 1000])
    assert table.learn[:, 0].tolist() == [True, False, True, True, True], "the first of equal medians"
    assert_rows(group_median(reward_table([1, 0, 0, 0, 1]), mad_floor=0.5).values, [2, 0, 0, 0, 2])


def test_the_median_of_an_even_number_is_the_lower_middle():
    # deviations from 2 are 1 0 1 8: lower middle of 0 1 1 8
    assert_rows(group_median(reward_table([1, 2, 3, 10]), mad_floor=1.0).values, [-0.5, 0, 0.5, 4])


def test_groups_have_their_own_median_and_unknown_rewards_are_not_counted():
    table = group_median(reward_table([5, None, 0, 7, 1, 3], group="ababab"), mad_floor=1.0)
    # a: 5 0 1, median 1, deviations 4 1 0; b: 7 3, median 3, deviations 4 0
    assert_rows(table.values[[0, 2, 4]], [2, -0.5, 0])
    assert_rows(table.values[[3, 5]], [4, 0])
    assert table.learn[:, 0].tolist() == [True, True, True, True, False, False]


def test_a_shift_of_the_rewards_changes_nothing():
    rewards = torch.rand(9, generator=torch.Generator().manual_seed(1)).tolist()
    table = reward_table(rewards, group="abc" * 3, length=range(1, 10))
    torch.testing.assert_close(group_median(table.put(table.values + 5)).values, group_median(table).values)


def test_equal_rewards_have_no_advantage_also_where_their_mean_is_rounded():
    assert group_median(reward_table([0.1] * 3, length=[1, 2, 4])).values.eq(0).all()
