"""Labels that the data know."""

from __future__ import annotations

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.columns import column_value, pair_column


def test_a_number_is_read_and_what_is_none_is_named():
    prompts = [Prompt(f"p{i}", (), columns=columns) for i, columns in enumerate([{"v": 2}, {}, {"v": "x"}])]
    outcome = Outcome(text="")
    assert column_value(prompts[:2], [outcome] * 2, column="v") == [2.0, None]
    cells = [Prompt("a", (), columns={"v": "2.5"}), Prompt("b", (), columns={"v": ""})]
    assert column_value(cells, [outcome] * 2, column="v") == [2.5, None]
    with pytest.raises(ValueError, match="prompt 'p2' has 'x' in the column 'v', which is no number"):
        column_value(prompts, [outcome] * 3, column="v")


def test_the_answers_of_a_pair_have_a_label_each_or_a_difference():
    pair = [Outcome(text="", recorded={"preferred": side}) for side in (1.0, 0.0)]
    read = lambda value: pair_column([Prompt("p", (), columns={"v": value})] * 2, pair, column="v")
    assert read([4, 2]) == [4.0, 2.0]
    assert read(1.5) == [0.75, -0.75]  # a difference of 1.5
    assert read(-1) == [-0.5, 0.5] and read(None) == [None, None]
    assert read("1.5") == [0.75, -0.75] and read("[4, 2.5]") == [4.0, 2.5]  # cells of CSV
    assert read("") == read(float("nan")) == [None, None]
    for wrong in ("x", [1], [1, 2, 3], True, [1, None], "1_0", [1, float("nan")]):
        with pytest.raises(
            ValueError, match="prompt 'p' has .* in the column 'v'; wanted a number, or a list"
        ):
            read(wrong)
    with pytest.raises(ValueError, match="prompt 'p' has no pair of a chosen and a rejected answer"):
        pair_column([Prompt("p", (), columns={"v": 1})], [Outcome(text="")], column="v")
