"""HGPO: turns with the same recent states, by worked numbers."""

from __future__ import annotations

import pytest

from mmrl.advantages.select import returns
from mmrl.papers.hgpo import history_groups
from tests.support.tables import assert_rows, reward_table


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


STATES = [["s0", "s1", "s2"], ["s0", "s1", "s2"], ["s0", "s3", "s2"]]


@pytest.mark.parametrize(
    "offset, third", [(1, [0.46, -0.54, 0.2]), (0, [0.466667, -0.533333, 0.2])], ids=["code", "paper"]
)
def test_history_groups_give_the_worked_numbers(offset, third):
    # The paper's example has returns of its own; with gamma 1 they are these.
    table = played([[-0.0475, -0.05, 1], [0, 0, 0], [-0.04, -0.04, 0.8]], state=STATES)
    assert_rows(returns(table).values[:, 0], [[0.9025, 0.95, 1], [0, 0, 0], [0.72, 0.76, 0.8]])
    found = history_groups(table, depth=1, gamma=1.0, weight_offset=offset).values[:, 0]
    wanted = [[0.361667, 0.475], [-0.540833, -0.475], [0.179167, 0]]
    assert_rows(found, [[*row, last] for row, last in zip(wanted, third, strict=True)], tolerance=3e-6)


def test_a_context_is_no_longer_than_the_conversation_so_far():
    # Equal states everywhere: the first turn has the depth 1 alone, the second both.
    table = played([[0, 1], [0, 0]], state=[["s", "s"], ["s", "s"]])
    found = history_groups(table, depth=1, gamma=1.0, weight_offset=0).values[:, 0]
    # Four turns of state s: returns 1, 1, 0, 0. Two with the history s s: returns 1, 0.
    assert_rows(found, [[0.5, 0.5], [-0.5, -0.5]], tolerance=1e-5)
