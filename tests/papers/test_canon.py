"""CANON: comparisons across and within halves of a group, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import group_center
from mmrl.papers.canon import conditional_halves
from tests.support.tables import assert_rows, reward_table

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


def test_the_higher_half_is_larger_and_a_bonus_moves_equal_rewards_too():
    table = reward_table([1, 1, 1], notes={"entropy": [[0.1], [0.2], [0.3]]})
    assert_rows(conditional_halves(table).values, [0, 0, 0])
    assert_rows(conditional_halves(table, b=0.1).values, [-0.1, 0.1, 0.1])
    assert_rows(conditional_halves(reward_table([1], notes={"entropy": [[0.1]]}), b=0.1).values, [0])


def test_equal_weight_of_equal_halves_is_dr_grpo():
    generator = torch.Generator().manual_seed(0)
    rewards, entropy = torch.rand((2, 16), generator=generator)
    table = reward_table(rewards.tolist(), group="abcd" * 4, notes={"entropy": entropy[:, None].tolist()})
    wanted = group_center(table).values
    torch.testing.assert_close(conditional_halves(table, mu=0.5).values, wanted)
