"""Baselines other than the mean: MC-GRPO, NGRPO, OPMD, OPO, Pass@k, CANON."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.baselines import (
    best_margin,
    conditional_halves,
    greedy_baseline,
    group_median,
    length_baseline,
    log_mean_exp,
    virtual_maximum,
)
from mmrl.advantages.normalize import group_center, group_normalize
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


def test_log_mean_exp_lies_between_mean_and_maximum():
    # b = log((2 e + 2) / 4) = .620115, halved
    found = log_mean_exp(reward_table([1, 0, 0, 1]))
    assert_rows(found.values, [0.189943, -0.310057, -0.310057, 0.189943])
    large = log_mean_exp(reward_table([1, 0, 0, 0]), tau=1e6)
    assert_rows(large.values * 1e6, [0.75, -0.25, -0.25, -0.25], tolerance=1e-5)
    shifted = log_mean_exp(reward_table([1001, 1000, 1000, 1001]))
    assert_rows(shifted.values, [0.189943, -0.310057, -0.310057, 0.189943])


def test_length_baseline_weighs_rewards_by_length():
    # (10 + 30) / 100
    table = reward_table([1, 0, 1, 0], length=[10, 20, 30, 40])
    assert_rows(length_baseline(table).values, [0.6, -0.4, 0.6, -0.4])


def test_length_baseline_of_equal_lengths_is_the_mean_and_an_empty_answer_counts_as_one_step():
    table = reward_table([1, 0, 0, 0], length=[3] * 4)
    assert_rows(length_baseline(table).values, group_center(table).values.flatten().tolist())
    assert_rows(length_baseline(reward_table([1, 0], length=[0, 3])).values, [0.75, -0.25])


def test_best_margin_gives_the_best_row_its_lead():
    # .4 over the deviation .359398
    found = best_margin(reward_table([0.2, 0.9, 0.5, 0.1]))
    assert_rows(found.values, [0, 1.112970, 0, 0])
    assert_rows(best_margin(reward_table([0.9, 0.9, 0.1])).values, [0, 0, 0])
    assert_rows(best_margin(reward_table([0.9])).values, [0])
    assert_rows(best_margin(reward_table([0.0, 1.0], group="ab")).values, [0, 0])


HALVES = reward_table([1, 0, 1, 1], notes={"entropy": [[0.9], [0.5], [0.2], [0.7]]})


@pytest.mark.parametrize(
    ("mu", "wanted"),
    [(1.0, [0.5, -1, 0, 0.5]), (0.5, [0.25, -0.75, 0.25, 0.25]), (0.0, [0, -0.5, 0.5, 0])],
)
def test_conditional_halves_compare_across_and_within_the_median_entropy(mu, wanted):
    assert_rows(conditional_halves(HALVES, mu=mu).values, wanted)


def test_conditional_halves_by_length_prefer_short_answers():
    table = reward_table([1, 0, 1, 1], length=[100, 300, 200, 50], notes={"entropy": [[0.0]] * 4})
    assert_rows(conditional_halves(table, covariate="length", a=0.9).values, [0.55, -1.0, -0.1, 0.55])


def test_equal_weight_of_equal_halves_is_dr_grpo():
    generator = torch.Generator().manual_seed(0)
    rewards, entropy = torch.rand((2, 16), generator=generator)
    table = reward_table(rewards.tolist(), group="abcd" * 4, notes={"entropy": entropy[:, None].tolist()})
    wanted = group_center(table).values
    torch.testing.assert_close(conditional_halves(table, mu=0.5).values, wanted)


def test_the_higher_half_is_larger_and_a_bonus_moves_equal_rewards_too():
    table = reward_table([1, 1, 1], notes={"entropy": [[0.1], [0.2], [0.3]]})
    assert_rows(conditional_halves(table).values, [0, 0, 0])
    assert_rows(conditional_halves(table, b=0.1).values, [-0.1, 0.1, 0.1])
    assert_rows(conditional_halves(reward_table([1], notes={"entropy": [[0.1]]}), b=0.1).values, [0])


@pytest.mark.parametrize("piece", [group_median, log_mean_exp, length_baseline, best_margin])
def test_baselines_do_not_feel_a_shift_of_the_rewards(piece):
    rewards = torch.rand(9, generator=torch.Generator().manual_seed(1)).tolist()
    table = reward_table(rewards, group="abc" * 3, length=range(1, 10))
    torch.testing.assert_close(piece(table.put(table.values + 5)).values, piece(table).values)


@pytest.mark.parametrize("piece", [group_normalize, group_median, log_mean_exp, length_baseline, best_margin])
def test_equal_rewards_have_no_advantage_also_where_their_mean_is_rounded(piece):
    assert piece(reward_table([0.1] * 3, length=[1, 2, 4])).values.eq(0).all()


def test_remax_subtracts_the_reward_of_the_greedy_answer():
    tags = {"greedy": ["", "", "yes", "", "yes", ""]}
    table = reward_table([1, 0.25, 0.5, 0.7, 0.2, 1], group="aaabbc", tags=tags)
    table = greedy_baseline(table)
    assert_rows(table.values[:, 0], [[0.5], [-0.25], [0], [0.5], [0], [0]])
    assert table.learn[:, 0].tolist() == [True, True, False, True, False, True]
    assert table.valid[:, 0, 0].tolist() == [True] * 5 + [False]  # a group without a greedy answer


def test_remax_without_a_greedy_answer_names_the_engine():
    with pytest.raises(ValueError, match="add the engine `vision.with_greedy`"):
        greedy_baseline(reward_table([1, 0]))
