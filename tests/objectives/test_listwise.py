"""Comparisons of all rows of a group: DisCO, P3O, DNO and AOT."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.objectives.compare import sigmoid
from mmrl.objectives.listwise import all_pairs, aot, dno
from mmrl.papers.disco import discriminate
from tests.objectives.test_compare import gained, shown, slope, softplus
from tests.support.tables import assert_rows

# ---- P3O


def test_p3o_is_half_the_reward_gap_times_the_gap_of_ratios():
    # -.75 / 2 (e^.1 - e^-.2); on-policy -.75 / 2 * .3; jointly clipped times e^-.1
    pair = [[0.1], [-0.2]], [0.75, 0.0]
    shown(all_pairs(*gained(*pair), epsilon=9.0), -0.107415)
    shown(all_pairs(*gained(*pair), form="on_policy"), -0.1125)
    shown(all_pairs(*gained(*pair), form="joint"), -0.1125 * math.exp(-0.1))


def test_p3o_clips_what_would_go_too_far():
    # the better row grew to e^.5 and stops at 1.2, the worse shrank to e^-.5 and stops at .8
    implicit_reward, batch = gained([[0.5], [-0.5]], [1.0, 0.0])
    loss = all_pairs(implicit_reward, batch)
    shown(loss, -0.5 * (1.2 - 0.8))
    assert not slope(loss, implicit_reward).any()
    # the other way round nothing is clipped
    implicit_reward, batch = gained([[-0.5], [0.5]], [1.0, 0.0])
    both = [[-0.5 * math.exp(-0.5)], [0.5 * math.exp(0.5)]]
    assert_rows(slope(all_pairs(implicit_reward, batch), implicit_reward), both)
    # jointly e^1 is cut to 1.2, as a constant weight
    implicit_reward, batch = gained([[0.7], [0.3]], [1.0, 0.0])
    joint = slope(all_pairs(implicit_reward, batch, form="joint"), implicit_reward)
    assert_rows(joint, [[-0.6], [0.6]])


def test_p3o_of_a_group_is_the_policy_gradient_of_centred_rewards():
    # over all pairs: -W_i (r_i - mean r) / (n - 1), whatever is added to the rewards
    rewards = [1.0, 0.0, 0.5, 2.5]
    for shift in (0.0, 7.0):
        implicit_reward, batch = gained([[0.0]] * 4, [r + shift for r in rewards])
        pull = slope(all_pairs(implicit_reward, batch), implicit_reward)
        assert_rows(pull[:, 0], [-(r - 1) / 3 for r in rewards])


@pytest.mark.parametrize("compare", [all_pairs, dno])
def test_pairs_are_inside_of_groups_and_a_group_of_one_has_none(compare):
    alone = [compare(*gained([[0.4], [0.1]], [1, 0])), compare(*gained([[-0.2], [0.9]], [0.5, 2]))]
    rows = [[0.4], [-0.2], [0.1], [0.9], [5.0]]
    both = compare(*gained(rows, [1, 0.5, 0, 2, 3], group=[4, 2, 4, 2, 9]))
    shown(both, (alone[0] + alone[1]) / 3)


# ---- DNO


def test_dno_takes_the_sigmoid_of_the_reward_gap_as_label():
    # s = sigm(.5) = .622459, z = .1 * 2: -s log sigm(.2) - (1 - s) log sigm(-.2)
    pair = gained([[1.5], [-0.5]], [0.8, 0.3])
    shown(dno(*pair), 0.673647)
    implicit_reward, batch = pair
    pull = 0.1 * (1 / (1 + math.exp(-0.2)) - 0.622459)
    assert_rows(slope(dno(implicit_reward, batch), implicit_reward), [[pull], [-pull]])


def test_dno_with_steep_labels_is_dpo_and_with_equal_rewards_asks_for_no_margin():
    shown(dno(*gained([[1.5], [-0.5]], [0.8, 0.3]), scale=1e3), sigmoid(*gained([[1.5], [-0.5]], [1, -1])))
    implicit_reward, batch = gained([[0.7], [0.7]], [1, 1])
    assert not slope(dno(implicit_reward, batch), implicit_reward).any()


# ---- AOT


def test_aot_of_a_pair_is_dpo():
    for rows in ([[0.7, -0.1], [0.2, 0.1]], [[-50.0], [50.0]]):
        shown(aot(*gained(rows, [1, -1])), sigmoid(*gained(rows, [1, -1])))
        smoothed = aot(*gained(rows, [1, -1]), label_smoothing=0.2)
        shown(smoothed, sigmoid(*gained(rows, [1, -1]), label_smoothing=0.2))


def test_aot_compares_sorted_rows():
    # 2 > 1 against 0 > -3: gaps 2 and 4, in any order of the rows
    rows, signs = [[1.0], [-3.0], [2.0], [0.0]], [1, -1, 2, -2]
    wanted = (softplus(-2.0) + softplus(-4.0)) / 2
    shown(aot(*gained(rows, signs), beta=1.0), wanted)
    shown(aot(*gained(rows[::-1], signs[::-1]), beta=1.0), wanted)


def test_aot_repeats_the_values_of_the_smaller_side():
    # one chosen row of 1 against -1, 0 and 2
    implicit_reward, batch = gained([[1.0], [-1.0], [0.0], [2.0]], [1, -1, -1, -1])
    shown(aot(implicit_reward, batch, beta=1.0), (softplus(-2.0) + softplus(-1.0) + softplus(1.0)) / 3)
    implicit_reward, batch = gained([[1.0], [0.0]], [1, 1])
    assert aot(implicit_reward, batch) == 0


@pytest.mark.parametrize("compare", [discriminate, all_pairs, dno, aot])
def test_gains_of_50_have_finite_slopes(compare):
    for far in ([50.0, -50.0, -50.0, 50.0], [-50.0, 50.0, 50.0, -50.0], [1e3, -1e3, 1e3, -1e3]):
        implicit_reward, batch = gained([[value] for value in far], [1, 0.5, -0.5, -1])
        loss = compare(implicit_reward, batch)
        assert torch.isfinite(loss) and slope(loss, implicit_reward).isfinite().all()
