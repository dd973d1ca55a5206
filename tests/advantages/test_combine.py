"""Several rewards and whole groups: DVAO, GPG, A-GRAE, ADORA, COPO."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.baselines import group_median
from mmrl.advantages.combine import (
    active_scale,
    adora,
    asymmetric_difficulty,
    consistency_mix,
    variance_weights,
)
from mmrl.advantages.normalize import group_center, group_normalize
from mmrl.advantages.shape import total
from tests.support.tables import assert_rows, reward_table

HALF = {"a": 0.5, "b": 0.5}


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


def test_variance_weights_of_equal_or_missing_rewards_add_nothing():
    table = reward_table({"a": [0.1] * 3, "b": [1, 0, None]}, weights=HALF)
    # b: mean .5, deviation sqrt(.5); the third row has a alone, which does not vary
    root = 0.5 / math.sqrt(0.5)
    assert_rows(variance_weights(table, eps=0.0).values, [root, -root, 0])
    assert variance_weights(reward_table([0.1] * 3), eps=0.0).values.eq(0).all()


def test_active_scale_counts_rewards_that_are_not_zero():
    # 12 rewards, 7 of them 1
    table = reward_table([1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0], group="aaaabbbbcccc")
    found = group_center(active_scale(total(table))).values
    a, b = 1.285714, 0.857143
    assert_rows(found, [a, *[-a / 3] * 3, *[0] * 4, -b, b, b, -b])
    assert active_scale(reward_table([0, 0])).values.eq(0).all()


def test_active_scale_by_group_is_the_one_of_mc_grpo():
    table = group_median(reward_table([0, 0.2, 0.5, 0.9, 1]))
    assert_rows(active_scale(table, by=("group",)).values / table.values.where(table.values != 0, 1.0),
                [1.25, 1.25, 0, 1.25, 1.25])  # fmt: skip


def test_asymmetric_difficulty_gives_the_worked_numbers():
    table = group_normalize(reward_table([1, 0, 0, 0, 1, 1, 1, 0], group="aaaabbbb"), eps=1e-6)
    found = asymmetric_difficulty(table, of="reward")
    assert_rows(found.values, [0.749997, *[-0.499998] * 3, *[0.538670] * 3, -3.232023])
    # at a mean success of 1/2 an alpha of 1/2 counts right answers in full
    assert_rows(asymmetric_difficulty(table, of="reward", alpha=0.5).values[:1], [1.499994])


def test_asymmetric_difficulty_counts_each_group_once_and_wants_a_success_rate():
    # p of 1 and 1/4, P = 5/8 though four of six rows are in the second group: A (.1875 / .5 + .3125 / .5)
    table = group_center(reward_table([1, 1, 1, 0, 0, 0], group="aabbbb"))
    assert_rows(asymmetric_difficulty(table, of="reward").values, [0, 0, 0.46875, *[-0.25] * 3], 1e-5)
    with pytest.raises(ValueError, match="'reward' must be a success between 0 and 1; .* 1.5 to 1.5"):
        asymmetric_difficulty(reward_table([1, 2]), of="reward")
    with pytest.raises(ValueError, match="no reward is called 'right'; there are reward"):
        asymmetric_difficulty(table, of="right")


def graded(lengths, finish=("stop",) * 4, **options):
    table = reward_table([1, 0, 0, 1], length=lengths, tags={"finish": list(finish)})
    return adora(table.put(torch.ones_like(table.values)), of="reward", **options).values.flatten().tolist()


def test_adora_keeps_groups_whose_longest_right_answer_beats_the_mean_wrong_one():
    assert graded([300, 250, 100, 200]) == [1] * 4  # 300 > 175
    assert graded([120, 250, 100, 110]) == [0.1] * 4
    assert graded([120, 250, 100, 110], ["stop", "length", "stop", "stop"]) == [1] * 4, "120 > 100"
    assert graded([120, 250, 100, 110], ["stop", "length", "length", "stop"]) == [0.1] * 4
    assert graded([300, 250, 100, 200], threshold=1.01) == [1] * 4, "none is right"
    assert graded([300, 250, 100, 200], threshold=1.01, no_success="scale") == [0.1] * 4


def test_consistency_mix_falls_back_on_the_prompt_where_answers_agree():
    rewards = {"reward": [1] * 6 + [1, 1, 1, 0, 0, 0] + [0] * 6, "cluster": [7] * 6 + [7, 7, 7, 3, 3, 5]}
    rewards["cluster"] = [*rewards["cluster"], 1, 2, 3, 4, 5, 6]
    table = reward_table(rewards, weights={"cluster": 0.0}, group="a" * 6 + "b" * 6 + "c" * 6)
    found = consistency_mix(table, of="cluster", threshold=1.5 / math.log(6)).values[:, 0, 0]
    # means 1, 1/2, 0 have the deviation .408248; gates 0, .000057, .997086
    assert_rows(found[:1], [1.224742])
    local = 0.5 / (math.sqrt(0.3) + 1e-6)
    gate = 1 / (1 + math.exp(-20 * (1.0114042647 - 1.5)))
    assert_rows(found[[6, 9]], [gate * local, -gate * local])
    assert_rows(found[12:13], [-1.224742 * (1 - 0.997086)], tolerance=5e-6)


def test_consistency_mix_of_one_prompt_has_no_other_to_compare_with():
    table = reward_table({"reward": [1, 0], "cluster": [1, 1]}, weights={"cluster": 0.0})
    assert consistency_mix(table, of="cluster").values.abs().max() < 1e-5
