"""GraphRAG-R1: F1, and what retrievals earn and cost, by worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.papers.graphrag_r1 import retrieval_bonus
from mmrl.rewards.text import answer_f1
from tests.rewards.test_text import asked, measure
from tests.rewards.test_tool_calls import SEARCHES, conversation, measured, nested, one


@pytest.mark.parametrize(
    ("answer", "target", "wanted"),
    [
        ("the Eiffel Tower", "eiffel tower paris", 0.8),  # P 1, R 2/3
        ("red_fox fox", "red fox", 0.8),  # with repeats: P 2/3, R 1
        ("True", "yes", 1),
        ("no, never", "no", 0),
        ("yes", ["no", "yes"], 1),
        ("blue", "red", 0),
        ("", "red", 0),
    ],
)
def test_answer_f1_compares_words(answer, target, wanted):
    text = f"<answer>wrong</answer> <answer>{answer}</answer>"
    assert measure(answer_f1, text, answer, prompt=asked(target)) == [pytest.approx(wanted), 0]


def test_retrievals_earn_less_and_less_and_copies_nothing():
    texts = ["".join(f"<search>{i}</search>" for i in range(n)) for n in range(5)]
    assert [one(retrieval_bonus, text, tag="search") for text in texts] == [0, 0.5, 0.75, 0.875, 0.9375]
    assert one(retrieval_bonus, "<search>a</search><search> a </search>", tag="search") == 0.5


def recorded(key):
    return {"name": "precomputed", "key": key}


def test_retrievals_cost_a_share_of_the_reward():
    piece = nested("cost_aware", reward=recorded("f1"), tag="search")
    texts = ["".join("<search>x</search>" for i in range(n)) for n in range(5)]
    outcomes = [Outcome(text, recorded={"f1": 0.8}) for text in texts] + [Outcome("")]
    found = piece([Prompt("a", ())] * 6, outcomes)
    assert found[:5] == pytest.approx([0.8, 0.723870, 0.654985, 0.592655, 0.536256], abs=1e-6)
    assert found[5] is None
    free = nested("cost_aware", reward=recorded("f1"), tag="search", free=3)
    assert free([Prompt("a", ())] * 6, outcomes)[4] == pytest.approx(0.8 * math.exp(-0.1))


def test_retrievals_are_those_of_the_whole_conversation():
    turns = ("<search>a</search>", "<search>b</search>", "done")
    row = conversation(*turns, every=True)
    bonus, _ = measured(row, "retrieval_bonus", tag="search", at="every")
    assert bonus == [[0.5, 0.25, 0]]  # a half for the first, a quarter more for the second
    reward = "tests.papers.test_graphrag_r1:one_each"
    cost, _ = measured(row, "cost_aware", reward=reward, tag="search", at="every")
    assert cost == [pytest.approx([math.exp(-0.1), math.exp(-0.2), math.exp(-0.2)])]


def one_each(prompts, outcomes) -> list[float]:
    return [1.0] * len(outcomes)


def test_calls_that_got_no_answer_are_no_retrievals():
    broken = "<tool_call>{oops</tool_call>"
    turns = (SEARCHES[0] + broken, SEARCHES[1])
    for finish, count in (("stop", 3), ("turns", 2), ("tool_error", 2), ("length", 2)):
        row = conversation(*turns)
        ended = replace(row.outcomes[-1], tags={"turn": "1", "finish": finish})
        row = replace(row, outcomes=(ended,))
        cost = measured(row, "cost_aware", reward="tests.papers.test_graphrag_r1:one_each")[0]
        assert cost == [[pytest.approx(math.exp(-0.1 * count))]], finish
