"""GUI-Owl: advantages over the number of turns."""

from __future__ import annotations

from mmrl.papers.gui_owl import episode_mean
from tests.support.tables import assert_rows, reward_table


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


def test_a_conversation_weighs_the_same_however_many_turns_it_has():
    table = played([[1, 1, 1, 1], [1, 1]])
    assert_rows(episode_mean(table).values[:, 0], [[0.25] * 4, [0.5] * 2])
    assert_rows(episode_mean(table, scale="mul").values[:, 0], [[4] * 4, [2] * 2])
