"""MasHost's HRPO: actions of a kind, by worked numbers."""

from __future__ import annotations

from mmrl.papers.mashost import action_credit
from tests.support.tables import assert_rows, reward_table


def test_an_action_is_compared_with_others_of_its_kind():
    table = reward_table(
        {"reward": [[1, 1], [0, 0]], "use": [[1, 0.5], [0, 1]]},
        weights={"use": 0.0},
        tags={"action": [["add", "link"], ["add", "stop"]]},
    )
    # add: 1 and 0 about 1/2; link and stop were chosen once
    assert_rows(action_credit(table, of="use").values[:, 0], [[1.25, 1], [-0.25, 0]])
