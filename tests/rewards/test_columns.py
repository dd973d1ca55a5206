"""Labels that the data know."""

from __future__ import annotations

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.columns import column_value


def test_a_number_is_read_and_what_is_none_is_named():
    prompts = [Prompt(f"p{i}", (), columns=columns) for i, columns in enumerate([{"v": 2}, {}, {"v": "x"}])]
    outcome = Outcome(text="")
    assert column_value(prompts[:2], [outcome] * 2, column="v") == [2.0, None]
    with pytest.raises(ValueError, match="prompt 'p2' has 'x' in the column 'v', which is no number"):
        column_value(prompts, [outcome] * 3, column="v")
