"""Checks of an answer and sets of answers: VeRPO, Polychromic."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.normalize import group_center
from mmrl.advantages.sets import rarity_weights, set_baseline
from tests.support.tables import assert_rows, reward_table


def test_rare_and_isolated_checks_weigh_more():
    # ten answers with the pass rates .9 .8 .1; the weights of the worked example are .215935 .238411 .902559
    checks = {"a": [1] * 9 + [0], "b": [1] * 8 + [0] * 2, "c": [1] + [0] * 9}
    found = rarity_weights(reward_table(checks))
    a, b, c = 0.215935, 0.238411, 0.902559
    assert_rows(found.values, [a + b + c, *[a + b] * 7, a, 0])
    assert found.names == ("total",)


def test_turns_are_compared_over_the_whole_group():
    # [1,1,0], [1,0,0], [1,1,1] weigh .454346 .215935 1.356905, as turns of one answer; the mean is .675729
    turns = torch.tensor([[0.454346, 0.215935, 1.356905]], dtype=torch.float64)
    table = reward_table([turns[0].tolist()])
    found = group_center(table, by=("group",)).values[:, 0]
    assert_rows(found, [[-0.221383, -0.459794, 0.681176]])


def test_checks_of_other_prompts_share_no_weight():
    table = reward_table({"a": [1, 0, None, None], "b": [None, None, 1, 0]}, group="aabb")
    weight = math.exp(-0.5)
    assert_rows(rarity_weights(table).values, [weight, 0, weight, 0])


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
