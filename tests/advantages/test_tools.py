"""Rewards for what wrong answers found: E-GRPO."""

from __future__ import annotations

from mmrl.advantages.tools import partial_credit
from tests.support.tables import assert_rows, reward_table


def test_answers_of_a_bad_format_or_that_were_cut_earn_nothing():
    measured = {"right": [1, 0, 0, 1], "entities": [0.5, 0.75, 0.25, 0.5], "format": [0, 1, 1, 1]}
    table = reward_table(
        measured,
        weights={"entities": 0.0, "format": 0.0},
        tags={"finish": ["stop", "stop", "length", "length"]},
    )
    # .3 * .75 / .75 for the second; the others have no format, or no end
    shaped = partial_credit(table, of="right", found="entities", unless="format")
    assert_rows(shaped.values[:, 0], [[0], [0.3], [0], [0]])
