"""HiPRAG: the gated bonus, by worked numbers."""

from __future__ import annotations

from mmrl.papers.hiprag import gated_bonus
from tests.support.tables import assert_rows, reward_table


def test_good_steps_are_paid_for_behind_a_right_answer_of_a_good_format():
    cases = [(1, 1, 0.75), (1, 1, 1.0), (1, 0, 1.0), (0, 1, 1.0), (0, 0, 1.0), (1, 1, None)]
    right, good, share = zip(*cases, strict=True)
    table = reward_table(
        {"right": right, "format": good, "share": share}, weights={"format": 0.0, "share": 0.0}
    )
    found = gated_bonus(table, of="right", format="format", share="share").values[:, 0]
    assert_rows(found, [[1.3], [1.4], [0.8], [0.2], [0], [1]])
