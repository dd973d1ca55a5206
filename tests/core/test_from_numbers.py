"""Tables from plain numbers: what is left out, ragged rows, holes, and rows that do not match."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import leave_one_out
from mmrl.core.from_numbers import reward_table, step_table
from mmrl.core.reward_table import ABSENT


def test_a_list_of_rewards_is_one_group():
    table = reward_table([1, 0, 0, 1])
    assert table.names == ("reward",) and len(set(table.group.tolist())) == 1
    assert leave_one_out(table).values.flatten().tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_rows_may_have_different_numbers_of_outcomes():
    table = reward_table({"a": [[1.0, 2.0], [None]], "b": [[0.0, 0.5], [3.0]]}, weights={"b": 0.0})
    assert table.ends.tolist() == [[1, 2], [1, ABSENT]] and table.names == ("a",)
    assert table.valid[:, 0].tolist() == [[True, True], [False, False]]
    assert table.scored["b"][1, 0] == 3.0 and table.scored["b"][1, 1].isnan()


def test_a_hole_inside_a_row_is_no_step_of_the_loss():
    output, batch = step_table([[-0.5, -1.0, -2.0], [-2.0]], advantage=[1.0, -1.0], mask=[[1, 0, 1], [1]])
    assert batch.totals.steps == 3.0 and batch.advantage.tolist() == [[1.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]
    assert output.logp.requires_grad and output.logp.dtype == torch.float64


@pytest.mark.parametrize("given", [{"group": "ab"}, {"notes": {"logp": [[0.0]]}}, {"on_policy": [True]}])
def test_rows_that_do_not_match_are_refused(given):
    with pytest.raises(ValueError, match=f"'{next(iter(given.get('notes') or given))}' has . rows, and .* 3"):
        reward_table([1, 0, 1], **given)
    with pytest.raises(ValueError, match="'b' has 2 rows"):
        reward_table({"a": [1, 0, 1], "b": [1, 0]})
