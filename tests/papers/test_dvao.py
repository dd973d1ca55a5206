"""DVAO: rewards weighed by their deviation, worked out by hand."""

from __future__ import annotations

import math

import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.shape import total
from mmrl.papers.dvao import variance_weights
from tests.support.tables import assert_rows, reward_table

HALF = {"a": 0.5, "b": 0.5}


def test_variance_weights_of_equal_or_missing_rewards_add_nothing():
    table = reward_table({"a": [0.1] * 3, "b": [1, 0, None]}, weights=HALF)
    # b: mean .5, deviation sqrt(.5); the third row has a alone, which does not vary
    root = 0.5 / math.sqrt(0.5)
    assert_rows(variance_weights(table, eps=0.0).values, [root, -root, 0])
    assert variance_weights(reward_table([0.1] * 3), eps=0.0).values.eq(0).all()


def test_variance_weights_divide_the_sum_by_the_sum_of_deviations():
    # .5 (r1 - .5) + .5 (r2 - .5) over .5 (.577350 + .294392)
    table = reward_table({"a": [1, 1, 0, 0], "b": [0.2, 0.4, 0.9, 0.5]}, weights=HALF)
    found = variance_weights(table, eps=0.0)
    assert_rows(found.values, [0.229426, 0.458851, -0.114713, -0.573564])
    assert found.names == ("total",)
    full = group_normalize(total(table), eps=0.0)
    assert_rows(full.values, [0.510754, 1.021508, -0.255377, -1.276885])


def test_variance_weights_never_exceed_grpo_and_equal_it_for_one_reward():
    rewards = torch.rand((3, 20), generator=torch.Generator().manual_seed(0)).tolist()
    table = reward_table(dict(zip("abc", rewards, strict=True)), group="abcd" * 5, weights={"b": -2.0})
    found = variance_weights(table, eps=0.0).values.abs()
    assert (found <= group_normalize(total(table), eps=0.0).values.abs() + 1e-12).all()
    one = reward_table(rewards[0], group="abcd" * 5)
    torch.testing.assert_close(variance_weights(one).values, group_normalize(one, eps=1e-6).values)
