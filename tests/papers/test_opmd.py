"""OPMD: the log-mean-exp as baseline, by worked numbers."""

from __future__ import annotations

import torch

from mmrl.papers.opmd import log_mean_exp
from tests.support.tables import assert_rows, reward_table


def test_log_mean_exp_lies_between_mean_and_maximum():
    # b = log((2 e + 2) / 4) = .620115, halved
    found = log_mean_exp(reward_table([1, 0, 0, 1]))
    assert_rows(found.values, [0.189943, -0.310057, -0.310057, 0.189943])
    large = log_mean_exp(reward_table([1, 0, 0, 0]), tau=1e6)
    assert_rows(large.values * 1e6, [0.75, -0.25, -0.25, -0.25], tolerance=1e-5)
    shifted = log_mean_exp(reward_table([1001, 1000, 1000, 1001]))
    assert_rows(shifted.values, [0.189943, -0.310057, -0.310057, 0.189943])


def test_a_shift_of_the_rewards_changes_nothing():
    rewards = torch.rand(9, generator=torch.Generator().manual_seed(1)).tolist()
    table = reward_table(rewards, group="abc" * 3, length=range(1, 10))
    torch.testing.assert_close(log_mean_exp(table.put(table.values + 5)).values, log_mean_exp(table).values)


def test_equal_rewards_have_no_advantage_also_where_their_mean_is_rounded():
    assert log_mean_exp(reward_table([0.1] * 3, length=[1, 2, 4])).values.eq(0).all()
