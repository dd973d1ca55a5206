"""Bounded bonuses and signs: GRPO-N, ASPO."""

from __future__ import annotations

from mmrl.advantages.bonus import (
    capped_bonus,
)
from tests.support.tables import assert_rows, reward_table


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
