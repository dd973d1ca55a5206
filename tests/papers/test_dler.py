"""Limits of length by difficulty: how they fall with accuracy, what they set to 0, and what is restored."""

from __future__ import annotations

import json

import pytest

from mmrl.papers.dler import DifficultyLimit
from tests.support.tables import assert_rows, reward_table


def answers(*rewards, length, **columns):
    return reward_table({"right": rewards, "format": [1] * len(rewards)}, length=length, **columns)


def test_an_answer_beyond_the_limit_of_its_prompt_earns_nothing():
    limit = DifficultyLimit(of="right", shortest=10, longest=50)
    table = answers(1, 1, 1, 0, length=[20, 21, 50, 51], group=["q"] * 4)
    limit.observe((), table)
    assert limit.limits(table).tolist() == [20] * 4  # 10 + 40 (1 - 3/4)
    found = limit(table)
    assert_rows(found.values[:, 0, 0], [1, 0, 0, 0])
    assert found.values[:, 1].eq(1).all()  # other rewards stay
    assert found.scored["right"].equal(table.scored["right"])


def test_prompts_have_limits_of_their_own_and_hard_ones_the_longest():
    limit = DifficultyLimit(of="right", shortest=10, longest=50)
    table = answers(1, 0, 1, None, length=[50, 50, 10, 10], group=["easy", "hard", "easy", "new"])
    limit.observe((), table)
    assert limit.limits(table).tolist() == [10, 50, 10, 50]
    assert_rows(limit(table).values[:3, 0, 0], [0, 0, 1])


def test_accuracy_runs_and_is_restored():
    limit = DifficultyLimit(of="right", shortest=10, longest=50, decay=0.5)
    for reward in (0, 1):  # 0, then .5 * 0 + .5 * 1
        limit.observe((), answers(reward, length=[5], group=["q"]))
    other = DifficultyLimit(of="right", shortest=10, longest=50)
    other.load_state_dict(json.loads(json.dumps(limit.state_dict())))
    assert other.limits(answers(1, length=[5], group=["q"])).tolist() == [30]


def test_a_reward_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no reward called 'right'"):
        DifficultyLimit(of="right")(reward_table([1]))
