"""GRPO-N: answers that are worse than their group."""

from __future__ import annotations

from mmrl.papers.grpo_n import negative_only
from tests.support.tables import assert_rows, reward_table


def test_negative_only_weighs_positive_advantages():
    table = reward_table([1.5, -0.5, -0.5, 0])
    assert_rows(negative_only(table).values, [0, -0.5, -0.5, 0])
    assert_rows(negative_only(table, positive_weight=0.25).values, [0.375, -0.5, -0.5, 0])
