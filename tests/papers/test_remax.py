"""The greedy answer to a prompt as a baseline."""

from __future__ import annotations

import pytest

from mmrl.core.rng import Stream
from mmrl.papers.remax import WithGreedy, greedy_baseline
from mmrl.vision.engines.generate import Generate
from tests.support.tables import assert_rows, reward_table
from tests.vision.test_contrastive_decoding import pictures, said


@pytest.fixture
def policy(exact):
    return exact("llava")


def test_every_prompt_gets_one_greedy_answer_more(policy):
    first, second = pictures()
    asked = [first, second, first]
    sampled = Generate(policy, stream=Stream(0), max_completion_length=5).rollout(asked)
    inner = Generate(policy, stream=Stream(0), max_completion_length=5)
    rows = WithGreedy(inner).rollout(asked)
    assert said(rows[:3]) == said(sampled) and all(row.on_policy for row in rows[:3])
    alone = Generate(policy, stream=Stream(7), max_completion_length=5, temperature=0.0)
    assert said(rows[3:]) == said(alone.rollout([first, second]))
    assert [row.group for row in rows[3:]] == [first.uid, second.uid]
    assert [row.outcomes[-1].tags.get("greedy") for row in rows] == [None, None, None, "yes", "yes"]
    assert not any(row.on_policy for row in rows[3:]) and inner.temperature == 1.0


def test_evaluations_get_no_greedy_answer(policy):
    stream = Stream(0, purpose="evaluate")
    inner = Generate(policy, stream=stream, max_completion_length=4)
    assert len(WithGreedy(inner).rollout(pictures())) == 2


def test_remax_subtracts_the_reward_of_the_greedy_answer():
    tags = {"greedy": ["", "", "yes", "", "yes", ""]}
    table = reward_table([1, 0.25, 0.5, 0.7, 0.2, 1], group="aaabbc", tags=tags)
    table = greedy_baseline(table)
    assert_rows(table.values[:, 0], [[0.5], [-0.25], [0], [0.5], [0], [0]])
    assert table.learn[:, 0].tolist() == [True, True, False, True, False, True]
    assert table.valid[:, 0, 0].tolist() == [True] * 5 + [False]  # a group without a greedy answer


def test_remax_without_a_greedy_answer_names_the_engine():
    with pytest.raises(ValueError, match="add the engine `vision.with_greedy`"):
        greedy_baseline(reward_table([1, 0]))
