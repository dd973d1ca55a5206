"""meow-tea-taro: shares of a won conversation, by worked numbers."""

from __future__ import annotations

from mmrl.advantages.select import returns
from mmrl.advantages.shape import total
from mmrl.papers.meow_tea_taro import share_among_turns
from tests.support.tables import assert_rows, reward_table


def test_a_conversation_that_was_won_shares_one_reward_among_its_turns():
    # meow-tea-taro: won with three paid turns; lost, of 4 in all; won without any paid turn
    table = reward_table(
        {
            "turn": [[0, 1, 0, 1, 1], [1, 0, 1, None, None], [0, 0, None, None, None]],
            "won": [[None] * 4 + [1], [None, None, 0, None, None], [None, 1, None, None, None]],
        },
        weights={"won": 0.0},
        tags={"turn": [list("01234"), [*"012", "", ""], [*"01", "", "", ""]]},
    )
    shared = share_among_turns(total(table), of="won", largest=4)
    third = 1 / 3
    assert_rows(shared.values[:1, 0], [[0, third, 0, third, third]])
    assert_rows(shared.values[1:2, 0, :3], [[0.25, 0, 0.25]])
    assert_rows(shared.values[2:, 0, :2], [[0, 0]])
    assert_rows(returns(shared).values[:1, 0], [[1, 1, 2 / 3, 2 / 3, 1 / 3]])
    assert_rows(share_among_turns(total(table), of="won", largest=0.5).values[1:2, 0, :3], [[1, 0, 1]])
