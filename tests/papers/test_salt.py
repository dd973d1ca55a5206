"""SALT: steps that conversations share."""

from __future__ import annotations

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.shape import total
from mmrl.advantages.turns import per_episode
from mmrl.papers.salt import shared_steps
from tests.support.tables import assert_rows, reward_table


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


def test_steps_that_runs_share_have_their_mean_advantage():
    paths = [list("xyz"), list("xyw"), list("xqz")]
    table = played([[None, None, 1], [None, None, 0], [None, None, 1]], action=paths)
    even = per_episode(table, advantage=(total, group_normalize_6))
    assert_rows(even.values[:, 0], [[0.577349] * 3, [-1.154699] * 3, [0.577349] * 3])
    found = shared_steps(even, of=("action",)).values[:, 0]
    wanted = [[0, -0.288675, 0.577349], [0, -0.288675, -1.154699], [0, 0.577349, 0.577349]]
    assert_rows(found, wanted)


def group_normalize_6(table):
    return group_normalize(table, eps=1e-6)


def test_without_history_paths_may_meet_again():
    # z after y and z after q: the same step to the same end without history, two steps with it.
    paths = [list("xyz"), list("xqz")]
    table = played([[1, 1, 1], [0, 0, 0]], action=paths)
    assert_rows(shared_steps(table, of=("action",)).values[:, 0], [[0.5, 1, 1], [0.5, 0, 0]])
    merged = shared_steps(table, of=("action",), history=False).values[:, 0]
    assert_rows(merged, [[1, 1, 0.5], [0, 0, 0.5]])  # x leads to y and to q, so it is two steps
