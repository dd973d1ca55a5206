"""Bounded bonuses, signs, and order: XRPO, ASPO, S-GRPO, SERR."""

from __future__ import annotations

import pytest

from mmrl.advantages.bonus import capped_bonus, entropy_rank, novelty, serial_decay, strategic_entropy
from mmrl.advantages.normalize import group_center, group_normalize
from tests.support.tables import assert_rows, reward_table


def test_novel_right_answers_have_a_bonus_of_at_most_half_their_advantage():
    logp = [[-0.2, -0.3, -0.1], [-1, -0.8], [-0.5] * 4, [-2, -1]]
    table = reward_table([1, 1, 0, 1], length=[3, 2, 4, 2], notes={"logp": logp})
    table = novelty(group_normalize(table, eps=1e-6))
    # means -.2 -.9 -.5 -1.5 about -.775
    assert_rows(table.scored["novelty"], [-0.777131, 0.117503, -0.316531, 0.515675])
    found = capped_bonus(table, of="novelty", coef=2.5, cap=0.5)
    assert_rows(found.values, [0.499999, 0.749999, -1.499997, 0.749999])


def test_early_code_is_worth_more_within_the_sign():
    table = reward_table(
        {"reward": [0.9, 0.9, 0.9, -0.9], "code": [100, 300, 500, 0]}, length=[800, 1000, 1200, 50]
    )
    table = table.replace(values=table.values[:, :1], valid=table.valid[:, :1], weights={"reward": 1.0})
    options = {"of": "code", "coef": -2.0, "cap": 0.7, "two_sided": True, "center": "length"}
    assert_rows(capped_bonus(table, **options).values, [1.3, 0.9, 0.5, -0.9])
    assert_rows(capped_bonus(table, **{**options, "coef": -20.0}).values, [1.53, 0.9, 0.27, -0.9])
    assert_rows(capped_bonus(table.select(table.values[:, 0, 0] < 0), **options).values, [-0.9])


def test_a_bonus_for_all_shrinks_negative_advantages_by_at_most_half():
    table = reward_table({"reward": [1, 0.2, -1, 0], "signal": [0.106307] * 4}, weights={"signal": 0.0})
    found = capped_bonus(table, of="signal", only_positive=False)
    assert_rows(found.values, [1.106307, 0.3, -0.893693, 0])


@pytest.mark.parametrize(
    ("right", "reward", "centred"),
    [
        ([0, 1, 1, 0, 1], [0, 1, 0.5, 0, 0.25], [-0.35, 0.65, 0.15, -0.35, -0.1]),
        ([1, 1, 1, 1], [1, 0.5, 0.25, 0.125], [0.53125, 0.03125, -0.21875, -0.34375]),
        ([0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_serial_decay_halves_every_later_right_exit(right, reward, centred):
    table = serial_decay(reward_table(right))
    assert_rows(table.values, reward)
    assert_rows(group_center(table).values, centred)


def test_serial_decay_counts_in_each_group_or_along_a_row():
    assert_rows(serial_decay(reward_table([1, 1, 1, 1], group="abba")).values, [1, 1, 0.5, 0.5])
    assert_rows(serial_decay(reward_table([[1, 0, 1], [1]]), by=("row",)).values[:, 0], [[1, 0, 0.5], [1]])


def cut(entropy, rewards=None, **options):
    rewards = rewards or [0] * len(entropy)
    finish = ["length"] * len(entropy)
    table = reward_table(
        rewards, length=[len(row) for row in entropy], notes={"entropy": entropy}, tags={"finish": finish}
    )
    return entropy_rank(table, of="reward", max_reward=1.0, **options).values


ENTROPIES = [[2, 0.1, 0.1, 0.1, 0.2], [1.5, 1.4, 0.2, 0.1], [1, 0.9, 0.8, 0.9, 1, 0.8], [0.5, 0.4, 0.6]]


def test_cut_answers_of_a_failed_group_are_ranked_by_peak_and_mean_entropy():
    # peaks 1.1 1.5 1 .6, means .5 .8 .9 .5: 1 1 0 0 are beaten
    assert_rows(cut(ENTROPIES, share=0.4), [5 / 6, 5 / 6, 1 / 6, 1 / 6])
    # peaks 1.5 1.1 1 .95 of one step each, means .3 .5 .9 .95
    steps = [[1.5, *[0.0] * 4], [1.1, 0.5, 0.2, 0.2], [1.0, 0.8], [0.95] * 3]
    assert_rows(cut(steps, share=0.2), [1, 2 / 3, 1 / 3, 0])


def test_answers_that_are_alone_or_not_cut_or_have_a_right_one_beside_them_are_not_ranked():
    assert_rows(cut([[2.0]]), [0])
    assert_rows(cut(ENTROPIES, [1, 0, 0, 0]), [1, 0, 0, 0])
    table = reward_table([0, 0], notes={"entropy": [[2.0], [1.0]]}, tags={"finish": ["stop", "stop"]})
    assert_rows(entropy_rank(table, of="reward").values, [0, 0])


def test_strategic_entropy_gives_the_worked_numbers():
    entropy, think = [[0.1, 0.6, 2.0, 2.0]] * 3, [[1, 1, 1, 0]] * 3
    table = reward_table([1.0, -0.5, 0.0], length=[4] * 3, notes={"entropy": entropy, "think": think})
    wanted = [[1.04, 1.24, 1.5, 1.0], [-0.46, -0.26, -0.25, -0.5], [0.0] * 4]
    assert_rows(strategic_entropy(table).values[:, 0], wanted)
    unknown = {"entropy": [[None] * 2], "think": [[1, 1]]}
    assert_rows(strategic_entropy(reward_table([1.0], length=[2], notes=unknown)).values[:, 0], [[1, 1]])
