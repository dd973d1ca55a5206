"""Groups with hinted rows: which rows count, and how much a hinted success is worth."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.shape import total
from mmrl.papers.hill import best_hint, hint_reward, hint_value
from mmrl.papers.scaf_grpo import first_success
from tests.support.tables import assert_rows, reward_table


def counted(table):
    return table.learn[:, 0].int().tolist()


@pytest.mark.parametrize("piece", [first_success, best_hint])
def test_a_piece_that_comes_too_late_in_the_chain_says_so(piece):
    table = total(reward_table([0, 1], tags={"hint": ["", "1"]}))
    with pytest.raises(ValueError, match="put it before `total`, or name one reward"):
        piece(table)
    piece(table, of="reward")


@pytest.mark.parametrize(
    ("rate", "reliance", "value"),
    [(4, -0.15, 0.601792), (1, -0.15, 0.398121), (4, 0.2, 0.992188), (8, -0.15, 0), (0, -0.15, 0)],
)
def test_a_hint_is_worth_what_the_paper_pays_for_it(rate, reliance, value):
    success = torch.tensor([True] * rate + [False] * (8 - rate))
    relied = torch.where(success, reliance, -9.0).double()  # failures do not count
    assert hint_value(success, relied, 0.3) == pytest.approx(value, abs=1e-6)


def test_of_two_hints_that_tell_as_much_the_one_is_kept_that_answers_rely_on_less():
    table = reward_table(
        {"reward": [0, 0, 0, 1, 0, 1], "hint_reliance": [None, None, -2.0, -1.0, 0.0, -0.5]},
        weights={"hint_reliance": 0.0},
        tags={"hint": ["", "", "1", "1", "2", "2"]},
    )
    assert counted(best_hint(table)) == [0, 0, 1, 1, 0, 0]
    assert counted(best_hint(table, reliance="hint_reliance")) == [0, 0, 0, 0, 1, 1]


def test_the_hint_that_tells_most_replaces_the_failed_group():
    hints = ["", "", "1", "1", "2", "2", "3", "3"]
    table = reward_table([0, 0, 0, 0, 0, 1, 1, 1], tags={"hint": hints})
    assert counted(best_hint(table)) == [0, 0, 0, 0, 1, 1, 0, 0]
    nothing = reward_table([0, 0, 0, 0, 1, 1], tags={"hint": hints[:6]})
    assert counted(best_hint(nothing)) == [1, 1, 0, 0, 0, 0]


def written(rewards, hints, wrote, gate):
    """Make the table of answers to one prompt, and of the hints that were written for it."""
    group = ["a"] * len(rewards)
    columns = {"right": rewards, "gate": gate}
    return reward_table(columns, group=group, tags={"hint": hints, "wrote": wrote})


def test_a_hint_earns_what_its_answers_did_with_it():
    # Two plain failures; hint 1 helps one of two answers, hint 2 both, hint 3 none; hint 4 was not shown.
    rewards = [0, 0, 0, 1, 1, 1, 0, 0, None, None, None, None]
    hints = ["", "", "1", "1", "2", "2", "3", "3", "", "", "", ""]
    wrote = [""] * 8 + ["1", "2", "3", "4"]
    gate = [None] * 8 + [0, 0, 0, -0.2]
    table = total(written(rewards, hints, wrote, gate))
    paid = hint_reward(table, of="right")
    # Of two answers, one right: 1 - (1/2)^2 - (1/2)^2 = 1/2.
    assert_rows(paid.values[8:, 0, 0], [0.5, 0.0, 0.0, -0.2])
    assert_rows(paid.values[:8, 0, 0], rewards[:8])
    # Hints are rows of the group, but neither plain answers nor answers to a hint.
    assert counted(best_hint(table, of="right")) == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_hint_that_answers_rely_on_earns_less_and_other_groups_do_not_count():
    rewards = {
        "right": [0, 0, 1, None, 0, 1],
        "gate": [None, None, None, 0.0, None, None],
        "hint_reliance": [None, -9.0, -0.15, None, None, 9.0],
    }
    tags = {"hint": ["", "1", "1", "", "1", "1"], "wrote": ["", "", "", "1", "", ""]}
    group = ["a", "a", "a", "a", "b", "b"]
    table = total(reward_table(rewards, weights={"hint_reliance": 0.0}, group=group, tags=tags))
    paid = hint_reward(table, of="right", reliance="hint_reliance")
    assert float(paid.values[3, 0, 0]) == pytest.approx(0.5 * 0.606531, abs=1e-6)  # exp(-0.15 / 0.3)


def test_a_hint_that_tells_no_more_than_the_plain_answers_earns_nothing():
    # 1 - 2 (1/2)^2 on both sides.
    table = written(
        [0, 1, 0, 1, None], ["", "", "1", "1", ""], ["", "", "", "", "1"], [None, None, None, None, 0]
    )
    assert float(hint_reward(total(table), of="right").values[4, 0, 0]) == 0.0


def test_a_hint_is_no_plain_answer():
    # Two plain answers, one right: 1/2. Three to the hint, one right: 1 - (1/3)^3 - (2/3)^3 = 2/3, which is
    # also what the plain ones would tell with the hint as a third.
    table = written(
        [0, 1, 0, 0, 1, None],
        ["", "", "1", "1", "1", ""],
        ["", "", "", "", "", "1"],
        [None, None, None, None, None, 0],
    )
    assert_rows(hint_reward(total(table), of="right").values[5:, 0, 0], [2 / 3])
