"""A-GRAE: weights of groups by difficulty, and of right answers by progress."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import group_center, group_normalize
from mmrl.papers.a_grae import asymmetric_difficulty
from tests.support.tables import assert_rows, reward_table


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
