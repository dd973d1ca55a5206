"""P3O: gaps of rewards and of log-ratios, by worked numbers."""

from __future__ import annotations

import math

import torch

from mmrl.papers.p3o import all_pairs
from tests.objectives.test_compare import gained, shown, slope
from tests.support.tables import assert_rows


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


def test_pairs_are_inside_of_groups_and_a_group_of_one_has_none():
    alone = [all_pairs(*gained([[0.4], [0.1]], [1, 0])), all_pairs(*gained([[-0.2], [0.9]], [0.5, 2]))]
    rows = [[0.4], [-0.2], [0.1], [0.9], [5.0]]
    both = all_pairs(*gained(rows, [1, 0.5, 0, 2, 3], group=[4, 2, 4, 2, 9]))
    shown(both, (alone[0] + alone[1]) / 3)


def test_gains_of_50_have_finite_slopes():
    for far in ([50.0, -50.0, -50.0, 50.0], [-50.0, 50.0, 50.0, -50.0], [1e3, -1e3, 1e3, -1e3]):
        implicit_reward, batch = gained([[value] for value in far], [1, 0.5, -0.5, -1])
        loss = all_pairs(implicit_reward, batch)
        assert torch.isfinite(loss) and slope(loss, implicit_reward).isfinite().all()
