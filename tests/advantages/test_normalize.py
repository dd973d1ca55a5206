"""Comparisons within groups and over the collection: GRPO, Dr. GRPO, RLOO, REINFORCE++, Lite PPO, AsymRE,
GDPO."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.normalize import (
    batch_normalize,
    group_center,
    group_normalize,
    leave_one_out,
)
from mmrl.advantages.select import per_step
from mmrl.advantages.shape import total
from tests.support.tables import assert_rows, prefix_rewards, reward_table

HARD, EASY = [1, 0, 0, 0], [1, 1, 1, 0]
CENTERINGS = [group_center, group_normalize, leave_one_out]


@pytest.mark.parametrize(("eps", "best", "other"), [(1e-4, 1.499700, -0.499900), (1e-6, 1.499997, -0.499999)])
def test_group_normalize_divides_by_the_sample_deviation_plus_eps(eps, best, other):
    # mean 1/4; squares .75^2 + 3 * .25^2 = .75 over n - 1 = 3 give 1/4, so the deviation is 1/2
    assert_rows(group_normalize(reward_table(HARD), eps=eps).values, [best, other, other, other])


def test_population_deviation_divides_by_the_count():
    # .75 over 4: the deviation is sqrt(3)/4, and .75 / (sqrt(3)/4) = sqrt(3)
    assert_rows(
        group_normalize(reward_table(HARD), std="population", eps=0.0).values,
        [math.sqrt(3), *[-1 / math.sqrt(3)] * 3],
    )


def test_batch_scale_centers_by_group_and_divides_by_the_deviation_of_all_rewards():
    # four ones, four zeros: squares 8 * .25 = 2 over 7; .75 / (sqrt(2/7) + 1e-4) = 1.402859, a third of it
    # .467620
    table = group_normalize(reward_table(HARD + EASY, group="aaaabbbb"), scale="batch")
    assert_rows(table.values, [1.402859, *[-0.467620] * 3, *[0.467620] * 3, -1.402859])


def test_group_center_subtracts_the_mean():
    assert_rows(group_center(reward_table(HARD)).values, [0.75, -0.25, -0.25, -0.25])


def test_a_shift_raises_the_baseline_also_where_all_rewards_are_equal():
    # AsymRE: mean 1/2 and shift -.1 make a baseline of .4; in the second group 1 - .9
    table = group_center(reward_table([1, 0, 0, 1, 1, 1], group="aaaabb"), shift=-0.1)
    assert_rows(table.values, [0.6, -0.4, -0.4, 0.6, 0.1, 0.1])


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # the first: 1 - 0; every other: 0 - 1/3
    assert_rows(leave_one_out(reward_table(HARD)).values, [1, -1 / 3, -1 / 3, -1 / 3])


def test_leave_one_out_may_divide_by_the_deviation_of_the_group_or_of_the_others():
    # mean 4, squares 9 + 1 + 1 + 9 = 20: away from the others' mean -4 -4/3 4/3 4; deviation sqrt(20 / 3)
    table = reward_table([1, 3, 5, 7])
    root = math.sqrt(20 / 3)
    far, near = 4 / root, 4 / 3 / root
    assert_rows(leave_one_out(table, scale="group", eps=0.0).values, [-far, -near, near, far])
    # the others of 1: 3 5 7, squares 8 over 2; of 3: 1 5 7, mean 13/3, squares 56/3 over 2
    near = 4 / 3 / math.sqrt(28 / 3)
    assert_rows(leave_one_out(table, scale="others", eps=0.0).values, [-2, -near, near, 2])
    # over 3 the deviations are sqrt(8/3) and sqrt(56/9)
    far, near = 4 / (math.sqrt(8 / 3) + 0.1), 4 / 3 / (math.sqrt(56 / 9) + 0.1)
    found = leave_one_out(table, scale="others", std="population", eps=0.1)
    assert_rows(found.values, [-far, -near, near, far])
    far = 4 / (math.sqrt(5) + 0.1)
    found = leave_one_out(table, scale="group", std="population", eps=0.1)
    assert_rows(found.values, [-far, -far / 3, far / 3, far])


def test_the_deviation_of_two_others_is_that_of_their_difference_at_any_scale():
    # the others of 1: 2 and 4, deviation sqrt(2); of 2: 1 and 4, sqrt(4.5); of 4: 1 and 2, sqrt(.5)
    wanted = [-2 / math.sqrt(2), -0.5 / math.sqrt(4.5), 2.5 / math.sqrt(0.5)]
    for factor in (1.0, 1e-5, 1e5):
        table = reward_table([factor, 2 * factor, 4 * factor])
        assert_rows(leave_one_out(table, scale="others", eps=0.0).values, wanted)


def test_where_the_others_are_equal_leave_one_out_divides_by_nothing():
    # the first is away by 1/2 from three equal ones; of each other, the others deviate by (1/2) / sqrt(3)
    rewards = [0.1 + 0.5, 0.1, 0.1, 0.1]
    other = -0.5 / 3 / (0.5 / math.sqrt(3))
    assert_rows(leave_one_out(reward_table(rewards), scale="others", eps=0.0).values, [0.5, *[other] * 3])
    assert_rows(leave_one_out(reward_table([0.2, 0.5]), scale="others").values, [-0.3, 0.3])
    assert_rows(leave_one_out(reward_table([0.3] * 3), scale="others").values, [0, 0, 0])


def test_whitening_over_steps_counts_longer_answers_more():
    # centred by group: .75 -.25 -.25 -.25 | .25 .25 .25 -.75, on 2 1 3 1 | 1 2 1 4 steps
    # sum over the 15 steps -1.75, so the mean is -.116667; squares 3.9375 less 15 * mean^2, over 14: var
    # .266667
    table = reward_table(HARD + EASY, group="aaaabbbb", length=[2, 1, 3, 1, 1, 2, 1, 4])
    table = batch_normalize(per_step(group_center(table)), eps=1e-8)
    per_row = [1.678293, *[-0.258199] * 3, *[0.710047] * 3, -1.226445]
    wanted = [[[value] * steps] for value, steps in zip(per_row, table.length.tolist(), strict=True)]
    assert_rows(table.values[:, 0], [row[0] for row in wanted])


def test_whitening_over_steps_has_mean_0_and_variance_1(generator):
    rewards = torch.rand(6, generator=generator).tolist()
    table = batch_normalize(per_step(reward_table(rewards, length=[1, 4, 2, 3, 5, 1])), eps=0.0)
    steps = table.values[table.valid]
    assert len(steps) == 16
    assert abs(float(steps.mean())) < 1e-12
    assert abs(float(steps.var()) - 1) < 1e-12


def test_a_single_entry_keeps_its_value_in_batch_normalize():
    assert_rows(batch_normalize(reward_table([0.7])).values, [0.7])


def test_batch_normalize_by_a_tag_compares_within_the_tag():
    table = reward_table([0, 2, 10, 14], tags={"role": ["spy", "spy", "guest", "guest"]})
    # deviations sqrt(2) and sqrt(8)
    half = math.sqrt(0.5)
    assert_rows(batch_normalize(table, by=("role",), eps=0.0).values, [-half, half, -half, half])


def gdpo(table):
    return batch_normalize(total(group_normalize(table)))


TWO_REWARDS = {"right": [1, 1, 0, 0, 1, 0, 0, 0], "form": [1, 0, 1, 0, 0.5, 0.5, 0.5, 0]}


def test_gdpo_normalizes_every_reward_then_the_sum_over_the_collection():
    table = reward_table(TWO_REWARDS, group="aaaabbbb")
    # first prompt: both rewards deviate by .577350; .5 / .577450 = .865876, twice where both are won
    assert_rows(
        total(group_normalize(table)).values,
        [1.731751, 0, 0, -1.731751, 1.999500, -0.000100, -0.000100, -1.999300],
    )
    assert_rows(gdpo(table).values, [1.224747, 0, 0, -1.224747, 1.414107, -0.000071, -0.000071, -1.413966])


def test_grpo_normalizes_the_sum_of_several_rewards():
    table = reward_table(TWO_REWARDS, group="aaaabbbb")
    # first prompt: sums 2 1 1 0 deviate by sqrt(2/3) = .816497; 1 / .816597 = 1.224595
    assert_rows(
        group_normalize(total(table)).values,
        [1.224595, 0, 0, -1.224595, 1.390538, -0.198648, -0.198648, -0.993241],
    )


def test_gdpo_tells_one_reward_won_from_two_where_grpo_does_not():
    # a group of two differs by 1, deviates by sqrt(1/2): .5 / (.707107 + 1e-4) = .707007 per reward that
    # differs
    one, two = {"a": [0, 1], "b": [0, 0]}, {"a": [0, 1], "b": [0, 1]}
    assert_rows(total(group_normalize(reward_table(one))).values, [-0.707007, 0.707007])
    assert_rows(total(group_normalize(reward_table(two))).values, [-1.414014, 1.414014])
    for rewards in (one, two):
        assert_rows(group_normalize(total(reward_table(rewards))).values, [-0.707, 0.707], tolerance=1e-4)


def test_weights_count_after_normalizing_in_gdpo_and_before_in_grpo():
    table = reward_table({"a": [0, 1, 1], "b": [1, 0, 1]}, weights={"a": 3.0, "b": -1.0})
    a, b = (group_normalize(reward_table(row)).values[:, 0, 0] for row in ([0, 1, 1], [1, 0, 1]))
    assert_rows(total(group_normalize(table)).values, (3 * a - b).tolist())
    raw = group_normalize(reward_table([-1, 3, 2])).values[:, 0, 0]
    assert_rows(group_normalize(total(table)).values, raw.tolist())


def test_two_rollouts_with_a_binary_reward_earn_plus_or_minus_the_root_of_one_half():
    table = group_normalize(reward_table([1, 0, 1, 1], group="aabb"), eps=0.0)
    assert_rows(table.values, [math.sqrt(0.5), -math.sqrt(0.5), 0, 0])


# ---- what all of them share


@pytest.mark.parametrize("center", [*CENTERINGS, batch_normalize])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3, 1e6])
def test_equal_rewards_give_exactly_0(center, value):
    # three times 0.1 is not 0.3 in floating point, and eps would blow the difference up
    assert (center(reward_table([value] * 3)).values == 0).all()


@pytest.mark.parametrize("center", CENTERINGS)
def test_a_group_of_one_gives_0_or_its_reward(center):
    table = reward_table([0.7, 1, 0], group="abb")
    assert center(table).values[0] == 0
    assert center(table, singleton="raw").values[0] == 0.7
    assert center(table).values[1] > 0


@pytest.mark.parametrize("center", CENTERINGS)
def test_advantages_of_a_group_sum_to_0_and_do_not_change_with_a_shift(center, generator):
    rewards = torch.rand(7, generator=generator, dtype=torch.float64)
    table = reward_table(rewards.tolist(), group="aabbbba")
    values = center(table).values
    for name in (0, 2):
        assert abs(float(values[table.group == table.group[name]].sum())) < 1e-12
    assert_rows(center(table.put(table.values + 5.0)).values, values.flatten().tolist(), tolerance=1e-12)


def test_without_eps_normalizing_does_not_change_with_a_positive_factor(generator):
    table = reward_table(torch.rand(5, generator=generator, dtype=torch.float64).tolist())
    values = group_normalize(table, eps=0.0).values
    scaled = group_normalize(table.put(table.values * 9.0), eps=0.0).values
    assert_rows(scaled, values.flatten().tolist(), tolerance=1e-12)


def test_leave_one_out_is_n_over_n_minus_1_times_the_centred_reward(generator):
    table = reward_table(torch.rand(5, generator=generator, dtype=torch.float64).tolist())
    wanted = group_center(table).values * 5 / 4
    assert_rows(leave_one_out(table).values, wanted.flatten().tolist(), tolerance=1e-12)


def test_a_reward_that_does_not_apply_stays_out_of_mean_and_deviation():
    table = reward_table([1, None, 0, 0, 0], group="aaaaa")
    values = group_normalize(table).values
    assert not table.valid[1]
    assert_rows(values[[0, 2, 3, 4]], [1.499700, -0.499900, -0.499900, -0.499900])
    assert leave_one_out(table).values[0] == 1


@pytest.mark.parametrize("center", [*CENTERINGS, batch_normalize])
def test_a_group_to_which_no_reward_applies_is_finite_and_stays_invalid(center):
    table = center(reward_table([None, None, 1, 0], group="aabb"))
    assert table.values.isfinite().all()
    assert table.valid[:, 0, 0].tolist() == [False, False, True, True]


def test_groups_may_have_different_sizes_and_stand_in_any_order():
    table = group_center(reward_table([4, 1, 0, 3, 5], group="abacb"))
    assert_rows(table.values, [2, -2, -2, 0, 2])


def test_outcomes_are_compared_with_those_in_the_same_place():
    # place 0: 0 2 4, place 1: 1 3; the last row has one outcome
    table = group_center(reward_table([[0, 1], [2, 3], [4]]))
    assert_rows(table.values[:, 0], [[-2, -1], [0, 1], [2]])
    assert not table.valid[2, 0, 1]


def test_by_nothing_compares_everything():
    table = group_center(reward_table([[0, 1], [2, 3], [4]]), by=())
    assert_rows(table.values[:, 0], [[-2, -1], [0, 1], [2]])
    table = group_center(prefix_rewards([0, 6]), by=())
    assert_rows(table.values[:, 0], [[-3, 3]])


def test_by_a_tag_compares_outcomes_of_equal_tags():
    table = reward_table([[1, 5], [3, 9]], tags={"state": [["x", "y"], ["y", "x"]]})
    # state x: 1 and 9; state y: 5 and 3
    assert_rows(group_center(table, by=("group", "state")).values[:, 0], [[-4, 1], [-1, 4]])


def test_comparing_by_an_unknown_id_names_those_there_are():
    with pytest.raises(ValueError, match="no outcome has the tag 'role'.* group, on_policy"):
        group_center(reward_table([1, 0]), by=("role",))


def test_the_confidence_of_urpa_cancels_in_a_normalized_reward():
    # spans 10-20 11-21 9-19 10-22 against their mean 10-20.5; format .5 everywhere, plus .5 c IoU
    # the deviation of the group divides c out again
    iou = torch.tensor([10 / 10.5, 9.5 / 11, 9 / 11.5, 10.5 / 12], dtype=torch.float64)
    wanted = [1.20875, -0.06866, -1.23499, 0.09491]
    for confidence in (1.0, 0.83317):
        table = reward_table((0.5 + 0.5 * confidence * iou).tolist())
        assert_rows(group_normalize(table, eps=0.0).values, wanted, tolerance=2e-5)


@pytest.mark.parametrize(
    ("damping", "wanted"), [(1.0, [-0.707105] * 4 + [1.414211] * 2), (2.0, [-0.353553] * 4 + [0.707106] * 2)]
)
def test_groups_with_stored_answers_are_damped(damping, wanted):
    # mean 1/3, population deviation sqrt(2)/3; the second group, all of it sampled, is compared as ever
    table = reward_table(
        [0, 0, 0, 0, 1, 1, 1, 0], group=[0] * 6 + [1] * 2, on_policy=[True] * 4 + [False] * 2 + [True] * 2
    )
    found = group_normalize(table, std="population", eps=1e-6, damping=damping)
    assert_rows(found.values, [*wanted, 0.999998, -0.999998])
