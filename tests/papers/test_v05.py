"""V_0.5: means shrunk to a prediction."""

from __future__ import annotations

import pytest

from mmrl.papers.v05 import shrunk_mean
from tests.support.tables import assert_rows, reward_table


@pytest.mark.parametrize(
    ("rewards", "baseline"),
    [([1.0, -1.0, -1.0, -1.0], -0.142857), ([1.0, -1.0, 1.0, -1.0], 0.2)],  # EX-34 of V_0.5, with V = 0.2
)
def test_a_mean_is_shrunk_to_a_prediction_until_rewards_contradict_it(rewards, baseline):
    table = reward_table({"r": rewards, "predicted": [0.2] * 4}, weights={"predicted": 0.0})
    found = shrunk_mean(table, of="predicted", low=-1.0, high=1.0).values[:, 0]
    assert_rows(found, [[reward - baseline] for reward in rewards], 1e-6)
    # Rewards from 0 to 1, where V is 0.6: everything is half as large.
    half = {"r": [(reward + 1) / 2 for reward in rewards], "predicted": [0.6] * 4}
    found = shrunk_mean(reward_table(half, weights={"predicted": 0.0}), of="predicted").values[:, 0]
    assert_rows(found, [[(reward - baseline) / 2] for reward in rewards], 1e-6)


def test_a_group_without_a_prediction_is_compared_with_its_mean():
    table = reward_table({"r": [1.0, 0.0], "predicted": [None, None]}, weights={"predicted": 0.0})
    assert_rows(shrunk_mean(table, of="predicted").values[:, 0], [[0.5], [-0.5]])
