"""Polychromic objective: sets of answers."""

from __future__ import annotations

import pytest
import torch

from mmrl.papers.polychromic import set_baseline
from tests.support.tables import assert_rows, reward_table


def scored(rewards, clusters, **options):
    table = reward_table({"reward": rewards, "cluster": clusters}, weights={"cluster": 0.0})
    return set_baseline(table, of="cluster", **options).values.flatten().tolist()


def test_sets_score_success_times_diversity():
    # means .5 .5 .25 0, distinct 3/4, all, all, 1: .375 .5 .25 0 about .28125
    rewards = [1, 0, 1, 0] + [1, 1, 0, 0] + [1, 0, 0, 0] + [0] * 4
    clusters = [1, 1, 2, 3] + [1, 2, 3, None] + [1, 2, 3, 4] + [1, 2, 3, 4]
    wanted = [0.09375] * 4 + [0.21875] * 4 + [-0.03125] * 4 + [-0.28125] * 4
    assert_rows(torch.tensor(scored(rewards, clusters)), wanted)


def test_sets_of_one_are_the_mean_of_the_group():
    assert_rows(torch.tensor(scored([1, 0, 0, 0], [1, 1, 1, 1], size=1)), [0.75, -0.25, -0.25, -0.25])
    assert scored([1], [1]) == [0]


def test_a_group_of_one_set_has_nothing_to_compare():
    with pytest.raises(
        ValueError, match="sets of 4 answers, but no group has more than 3, so every advantage"
    ):
        scored([1, 0, 0], [1, 2, 3])
