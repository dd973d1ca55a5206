"""Bending rewards and advantages: TempSamp-R1's three stabilisers, limits, and URPA's confidence."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.shape import (
    clip_advantage,
    scale,
    scale_by,
    tempsamp_anchor,
    tempsamp_downscale,
    tempsamp_shaping,
)
from tests.support.tables import assert_rows, prefix_rewards, reward_table

# Three sampled answers and a demonstration, as in the paper's example.
GROUP = {"rewards": {"iou": [0.6, 0.7, 0.5, 1.0]}, "on_policy": [True, True, True, False]}


def demonstrated():
    return reward_table(GROUP["rewards"], on_policy=GROUP["on_policy"])


SHAPED = [
    (0.0, 0.086764), (0.1, 0.210020), (0.2, 0.321546), (0.3, 0.422459), (0.5, 0.596390), (0.6, 0.671149),
    (0.7, 0.738793), (0.79, 0.794151), (0.8, 0.8), (0.9, 0.800953), (1.0, 0.801823),
]  # fmt: skip


def test_soft_shape_compresses_above_the_threshold_and_stretches_below():
    # above: .8 + .01 ln(1.2) = .801823; below, at 0: .8 - (e^.8 - 1) / (e - 1) = .086764
    table = tempsamp_shaping(reward_table({"iou": [reward for reward, _ in SHAPED]}), of="iou")
    assert_rows(table.values[:, 0], [[shaped] for _, shaped in SHAPED])


def test_soft_shape_is_continuous_and_rising():
    around = [0.8 - 1e-9, 0.8, 0.8 + 1e-9]
    values = tempsamp_shaping(reward_table({"iou": around}), of="iou").values.flatten()
    assert_rows(values, [0.8] * 3, tolerance=1e-8)
    rising = tempsamp_shaping(reward_table({"iou": [i / 50 for i in range(51)]}), of="iou").values.flatten()
    assert (rising.diff() > 0).all()


def test_soft_shape_leaves_other_rewards_and_the_measured_one_alone():
    table = tempsamp_shaping(reward_table({"format": [1, 0], "iou": [0.5, 1.0]}), of="iou")
    assert_rows(table.values[:, 0], [[1], [0]])
    assert table.scored["iou"].tolist() == [[0.5], [1.0]]


def test_the_demonstration_pushes_all_sampled_answers_down_unless_rewards_are_shaped():
    # mixed: mean .7, deviation .216025; shaped: mean .701939 of .671149 .738793 .596390 .801823
    mixed = group_normalize(demonstrated(), eps=1e-6)
    assert_rows(mixed.values, [-0.4629, 0.0, -0.9258, 1.3887], tolerance=5e-5)
    shaped = group_normalize(tempsamp_shaping(demonstrated(), of="iou"), eps=1e-6)
    assert_rows(shaped.values, [-0.3496, 0.4159, -1.1956, 1.1293], tolerance=5e-5)


def test_downscale_gives_demonstrations_a_share_of_the_largest_reward():
    table = tempsamp_downscale(demonstrated(), of="iou")
    assert_rows(table.values, [0.6, 0.7, 0.5, 0.8])
    # mean .65, deviation .129099
    assert_rows(group_normalize(table, eps=1e-6).values, [-0.3873, 0.3873, -1.1619, 1.1619], tolerance=5e-5)
    assert tempsamp_downscale(demonstrated(), of="iou", factor=0.5, max_reward=3.0).values[3] == 1.5


def anchored(table, **options):
    return tempsamp_anchor(group_normalize(table, by=("group", "place", "on_policy"), eps=1e-6), **options)


def test_anchor_gives_the_demonstration_more_than_the_best_sampled_answer():
    # sampled alone: mean .6, deviation .1, so 0 1 -1; the demonstration gets 1.2 times the best
    assert_rows(anchored(demonstrated()).values, [0, 1, -1, 1.2], tolerance=2e-5)
    assert_rows(anchored(demonstrated(), lambda_off=2.0).values, [0, 1, -1, 2], tolerance=5e-5)


def test_anchor_gives_0_where_sampled_answers_tie_or_there_is_only_one():
    tied = reward_table([0.5, 0.5, 1.0], on_policy=[True, True, False])
    assert anchored(tied).values.flatten().tolist() == [0, 0, 0]
    alone = reward_table([0.5, 1.0], on_policy=[True, False])
    assert anchored(alone).values.flatten().tolist() == [0, 0]


def test_anchor_without_a_sampled_answer_keeps_what_was_there():
    table = reward_table([0.3, 1.0, 0.0], group="abb", on_policy=[False, True, True])
    assert_rows(tempsamp_anchor(table).values, [0.3, 1.0, 0.0])


def test_anchor_reads_only_sampled_answers_of_its_own_group_to_which_the_reward_applies():
    table = reward_table(
        [0.2, None, 0.0, 9.0, 0.0], group="aaabb", on_policy=[True, True, False, True, False]
    )
    assert_rows(tempsamp_anchor(table, lambda_off=1.5).values, [0.2, 0, 0.3, 9.0, 13.5])


def test_limit_clips_on_both_sides():
    assert_rows(clip_advantage(reward_table([-9, -2, 3, 7])).values, [-5, -2, 3, 5])
    assert_rows(clip_advantage(reward_table([-9, 0.5]), max_advantage=1.0).values, [-1, 0.5])


def test_scale_by_multiplies_by_a_label():
    # URPA with the confidence on the advantage, the reading under which it does not cancel
    table = reward_table(
        {"iou": [1, 0, 1, 0], "confidence": [0.5, 0.5, 0.2, None]}, group="aabb", weights={"confidence": 0.0}
    )
    table = scale_by(group_normalize(table, eps=0.0), of="confidence")
    half = 0.5**0.5
    assert_rows(table.values, [0.5 * half, -0.5 * half, 0.2 * half, 0])


def test_scale_by_reads_the_label_of_each_place():
    table = reward_table({"a": [[1, 2]], "label": [[3, 5]]}, weights={"label": 0.0})
    assert_rows(scale_by(table, of="label").values[:, 0], [[3, 10]])


@pytest.mark.parametrize("shape", [tempsamp_shaping, tempsamp_downscale, scale_by])
def test_an_unknown_reward_is_named_with_those_there_are(shape):
    with pytest.raises(ValueError, match="'iou'.*reward"):
        shape(prefix_rewards([0, 1]), of="iou")


def test_rescale_multiplies_and_brings_limited_advantages_to_1():
    # AWM: -7 -2.5 .4 6 are held within 5 of 0 and divided by 5
    table = scale(clip_advantage(reward_table([-7, -2.5, 0.4, 6])))
    assert_rows(table.values[:, 0], [[-1], [-0.5], [0.08], [1]])
    assert_rows(scale(reward_table([3.0]), factor=2.0).values[:, 0], [[6]])


def test_anchor_does_not_mix_rewards_and_places_up():
    rewards = {"a": [[1, 5], [2, 4], [0, 0]], "b": [[6, 1], [9, 2], [0, 0]]}
    found = tempsamp_anchor(reward_table(rewards, on_policy=[True, True, False]), lambda_off=2.0)
    assert_rows(found.values[2], [[4, 10], [18, 4]])
    assert_rows(found.values[0], [[1, 5], [6, 1]])
    rewards["a"][0] = [1, None]  # 4 is then the best at the second place
    found = tempsamp_anchor(reward_table(rewards, on_policy=[True, True, False]), lambda_off=2.0)
    assert_rows(found.values[2], [[4, 8], [18, 4]])


# ---- Video-R1's band of lengths
