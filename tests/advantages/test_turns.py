"""Advantages over turns of conversations, by the worked numbers of the papers."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import group_center, group_normalize, leave_one_out
from mmrl.advantages.select import returns
from mmrl.advantages.shape import scale
from mmrl.advantages.turns import (
    gigpo,
    per_episode,
)
from tests.support.tables import assert_rows, reward_table


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


TWO = played([[0, 0, 1], [0, 0]], state=[["s0", "s1", "s2"], ["s0", "s1"]])


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({}, [[0.85125, 0.875, 0.4], [-1.05125, -1.075]]),
        ({"scale": "group"}, [[1.437401, 1.437401, 0.730295], [-1.802549, -1.802549]]),
        # counted once the scores differ from 1/2
        ({"count": "episode"}, [[0.95125, 0.975, 0.5], [-0.95125, -0.975]]),
        ({"omega": 0.0}, [[0.4] * 3, [-0.6] * 2]),
    ],
    ids=str,
)
def test_gigpo_gives_the_worked_numbers(options, wanted):
    assert_rows(gigpo(TWO, **options).values[:, 0], wanted)


def test_gigpo_compares_a_turn_without_a_state_with_none():
    table = played([[0, 0, 1], [0, 0]], state=[["s0", "", ""], ["s0", ""]])
    assert_rows(gigpo(table).values[:, 0], [[0.85125, 0.4, 0.4], [-1.05125, -0.6]])


def test_gigpo_without_states_names_the_tag():
    with pytest.raises(ValueError, match="no outcome has the tag 'state'"):
        gigpo(played([[0, 1], [0, 0]]))


def test_turns_of_one_number_are_compared_as_in_matchtir():
    table = played([[0.5, 1], [1, 0, 0]])
    options = {"gamma": 0.9, "same": ("place",), "scale": "group", "count": "episode", "singleton": "raw"}
    assert_rows(returns(table, gamma=0.9).values[:, 0], [[1.4, 1], [1, 0, 0]])
    halved = scale(gigpo(table, **options), factor=0.5)
    assert_rows(halved.values[:, 0], [[0.707105] * 2, [-0.707105, -0.707105, -0.353552]])


# ---- roles


def test_returns_of_a_player_leave_out_the_turns_of_others():
    table = played([[1, 10, 2, 20, 4]], role=[["A", "B", "A", "B", "A"]])
    assert_rows(returns(table, gamma=0.5, by=("role",)).values[:, 0], [[3, 20, 4, 20, 4]])


def test_games_of_one_start_are_compared_with_the_others():
    table = played([[1, 0], [0, 2], [3, 1]])
    found = leave_one_out(returns(table, gamma=0.96))
    assert_rows(found.values[:, 0], [[-1.94, -1.5], [-0.56, 1.5], [2.5, 0]])


def test_a_public_baseline_is_that_of_a_class_of_roles():
    # AdvEvo-MARL: attackers and defenders; then all are divided by one deviation
    table = reward_table([1, 0.5, 0, -0.2, 0.6], tags={"role": ["a", "a", "a", "d", "d"]})
    centred = group_center(table, by=("role",))
    assert_rows(centred.values[:, 0], [[0.5], [0], [-0.5], [-0.4], [0.4]])
    found = group_normalize(centred, by=(), std="population", eps=0.0).values[:, 0]
    assert_rows(found, [[1.234662], [0], [-1.234662], [-0.987730], [0.987730]])


def by_role(table):
    return group_center(table, by=("group", "role"))


def test_roles_without_their_tag_are_a_clear_error():
    with pytest.raises(ValueError, match="no outcome has the tag 'role', which the engine or the data set"):
        per_episode(played([[0, 1], [0, 0]]), by=("role",), advantage=(by_role,))
