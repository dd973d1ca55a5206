"""M-GRPO: rewards of sub-agents, by worked numbers."""

from __future__ import annotations

from mmrl.advantages.normalize import group_center
from mmrl.advantages.turns import per_episode
from mmrl.papers.m_grpo import delegated_reward
from tests.support.tables import assert_rows, reward_table


def test_sub_agents_earn_by_what_the_main_agent_reached():
    # Three conversations: right, wrong, right with a sub-agent of a bad format; two sub-agents' turns each.
    table = reward_table(
        {
            "right": [[None, None, 1], [None, None, 0.1], [None, None, 1]],
            "format": [[1, 1, 1], [1, 1, 1], [1, 0, 1]],
        },
        weights={"format": 0.0},
        tags={"turn": [list("012")] * 3, "role": [["main", "sub", "main"]] * 3},
    )
    rewarded = delegated_reward(table, of="right", format="format")
    assert rewarded.valid[:, 0].tolist() == [[False, True, True]] * 3
    assert_rows(rewarded.values[:, 0, 1:], [[1, 1], [0.1, 0.1], [0, 1]])
    merged = per_episode(rewarded, by=("role",), advantage=(by_role,))
    mean = 1.1 / 3
    assert_rows(merged.values[:, 0, 1:2], [[1 - mean], [0.1 - mean], [-mean]])
    assert_rows(merged.values[:, 0, ::2], [[0.3, 0.3], [-0.6, -0.6], [0.3, 0.3]])


def by_role(table):
    return group_center(table, by=("group", "role"))
