"""GPG: the share of rewards that are not 0, by worked numbers."""

from __future__ import annotations

from mmrl.advantages.normalize import group_center
from mmrl.advantages.shape import total
from mmrl.papers.gpg import active_scale
from mmrl.papers.mc_grpo import group_median
from tests.support.tables import assert_rows, reward_table


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
