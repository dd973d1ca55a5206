"""Credit by completed prefixes: values of prefixes, and the worked examples of SPO and IGPO."""

from __future__ import annotations

import math

import pytest

from mmrl.advantages.normalize import group_center
from mmrl.advantages.prefixes import mean_by_end
from mmrl.advantages.select import increments, returns
from mmrl.advantages.shape import total
from mmrl.advantages.tokens import keep_steps
from mmrl.core.step_table import spread
from tests.support.tables import assert_rows, reward_table, step_table


def test_mean_by_end_averages_what_applies():
    rows = [[1, None, 4, 5], [2, 7], [3]]
    table = mean_by_end(reward_table(rows, ends=[[0, 0, 0, 3], [2, 2], [4]]))
    assert table.ends.tolist() == [[0, 3], [2, -1], [4, -1]]
    assert_rows(table.values[:, 0], [[2.5, 5], [4.5], [3]])
    assert table.valid[:, 0].tolist() == [[True, True], [True, False], [True, False]]
    assert_rows(table.scored["reward"], [[2.5, 5], [4.5, math.nan], [3, math.nan]])
    assert_rows(
        mean_by_end(reward_table(rows, ends=[[0, 0, 0, 3], [2, 2], [4]]), best=True).values[:, 0],
        [[4, 5], [7], [3]],
    )


def test_mean_by_end_keeps_the_ids_of_the_answer():
    table = reward_table([[0, 1, 1]], ends=[[2, 2, 5]], tags={"finish": [["", "", "stop"]]})
    reduced = mean_by_end(table)
    assert reduced.ids["finish"].tolist() == [[0, int(table.ids["finish"][0, 2])]]
    assert reduced.ids["place"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("ends", "probability", "wanted"),
    [
        (
            [1, 1, 5, 5, 8],
            [0.99, 0.5, 0.95, 0.6, 0.97, 0.7, 0.99, 0.3],
            [0, -0.25, 0, -0.25, 0, 0.75, 0, 0.75],
        ),
        (
            [0, 0, 4, 4, 8],
            [0.4, 0.99, 0.6, 0.97, 0.7, 0.99, 0.3, 0.95],
            [-0.25, 0, -0.25, 0, 0.75, 0, 0.75, 0],
        ),
    ],
)
def test_spo_credits_unlikely_tokens_by_the_change_of_value(ends, probability, wanted):
    logp = [math.log(p) for p in probability]
    table = reward_table([[0, 1, 0, 0.5, 1]], ends=[ends], length=[8], notes={"logp": [logp]})
    credit = increments(mean_by_end(total(table)))
    assert_rows(keep_steps(credit, of="logp", at_most=math.log(0.9)).values[:, 0], [wanted])
    kept = keep_steps(credit, of="logp", at_most=math.log(0.9), drop=True)
    batch = spread(kept, step_table([[0.0] * 8])[1])
    assert_rows(batch.advantage, [wanted])
    assert batch.mask.tolist() == [[float(p < 0.9) for p in probability]]


def test_rows_without_a_cut_are_not_learned_from():
    table = reward_table([1, 0], length=[2, 3], notes={"logp": [[0, 0], [0, 0, 0]]})
    credit = increments(mean_by_end(total(table)))
    assert credit.ends.tolist() == [[-1], [-1]]
    credit = keep_steps(credit, of="logp", at_most=math.log(0.9), drop=True)
    batch = spread(credit, step_table([[0.0] * 2, [0.0] * 3])[1])
    assert batch.mask.sum() == 0 and batch.advantage.abs().sum() == 0


def test_igpo_credits_turns_by_the_rise_of_the_right_answer():
    table = reward_table(
        {"gold": [[0.1, 0.3, 0.6, None], [0.1, 0.2, 0.15, None]], "f1": [[0.7, 0, 0.9, 1], [0, 1, 1, 0]]},
        group="aa",
        ends=[[0, 2, 4, 6], [0, 2, 4, 6]],
    )
    gained = total(increments(table, of=("gold",)))
    assert_rows(gained.values[:, 0], [[0.2, 0.3, 1], [0.1, -0.05, 0]])
    carried = returns(gained)
    assert_rows(carried.values[:, 0], [[1.5, 1.3, 1], [0.05, -0.05, 0]])
    assert_rows(group_center(carried).values[:, 0], [[0.725, 0.675, 0.5], [-0.725, -0.675, -0.5]])
    with pytest.raises(ValueError, match="no reward called 'silver' here; it has gold, f1"):
        increments(table, of=("silver",))
