"""Rewards of tool calls, by the worked numbers of the papers."""

from __future__ import annotations

import json
import math

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import parse_calls
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.rewards.tool_calls import (
    call_match,
    calls_in,
    early_answer,
    entity_match,
    likeness,
    matched,
    retrieval_bonus,
    tool_calls,
)
from mmrl.training.score import score


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def written(*calls):
    return "I look. " + " ".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in calls)


def one(piece, text, columns=None, tags=None, **options):
    prompt = Prompt("a", (), columns=columns or {})
    return piece([prompt], [Outcome(text, tags=tags or {})], **options)[0]


PREDICTED = (call("search", q="a", k=5), call("Search", q="b"), call("calc", x=1))
REFERENCE = [call("search", q="b"), call("search", q="a", k=3)]


def test_calls_are_well_formed_json_with_a_name():
    text = written(*PREDICTED) + '<tool_call>{"name": 3}</tool_call><tool_call>{oops</tool_call><tool_call>[]'
    assert [found["name"] for found in calls_in(text)] == ["search", "Search", "calc"]
    assert one(tool_calls, text) == 3 and one(tool_calls, text, name="calc") == 1
    assert one(tool_calls, "no call") == 0
    assert calls_in("<tool_call>" + "[" * 100_000 + "</tool_call>") == []


def test_likeness_of_calls_is_the_worked_one():
    alike = [[likeness(each, reference) for reference in REFERENCE] for each in PREDICTED]
    assert alike == [[pytest.approx(0.5), pytest.approx(0.75)], [1, pytest.approx(0.375)], [0, 0]]
    assert matched(alike, "greedy") == [0.75, 1, 0]
    found = one(call_match, written(*PREDICTED), {"calls": REFERENCE})
    assert found == pytest.approx(0.583333, abs=1e-6)


def test_greedy_is_not_optimal():
    alike = [[0.9, 0.8], [0.8, 0.0]]
    assert sum(matched(alike, "greedy")) == pytest.approx(0.9)
    assert sum(matched(alike, "optimal")) == pytest.approx(1.6)
    assert matched([[0.2], [0.7], [0.1]], "optimal") == [0, 0.7, 0]
    assert matched([[0.2, 0.7, 0.1]], "optimal") == [0.7]


def test_calls_without_a_reference_are_not_judged():
    assert one(call_match, written(*PREDICTED)) is None
    assert one(call_match, "no call", {"calls": REFERENCE}) == 0
    with pytest.raises(ValueError, match="wants calls like .* prompt 'a' has 'search'"):
        one(call_match, "no call", {"calls": ["search"]})


def test_retrievals_earn_less_and_less_and_copies_nothing():
    texts = ["".join(f"<search>{i}</search>" for i in range(n)) for n in range(5)]
    assert [one(retrieval_bonus, text, tag="search") for text in texts] == [0, 0.5, 0.75, 0.875, 0.9375]
    assert one(retrieval_bonus, "<search>a</search><search> a </search>", tag="search") == 0.5


def nested(name, **options):
    return Pieces(Stream()).make("reward", Piece(name, options))


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
    def said(role, text):
        return Message(role, (Part(text),))

    turns = (
        said("assistant", "<search>a</search>"),
        said("tool", "<search>of a page</search>"),
        said("assistant", "<search>b</search>"),
        said("tool", "y"),
        said("assistant", "done"),
    )
    outcomes = tuple(Outcome(text, tags={"turn": str(i)}) for i, text in enumerate(("x", "y", "done")))
    row = Trajectory(Prompt("a", ()), "a", outcomes, None, 3, turns=turns)
    bonus = nested("retrieval_bonus", tag="search", at="every")
    cost = nested("cost_aware", reward="tests.rewards.test_tool_calls:one_each", tag="search", at="every")
    table = score([bonus, cost], (row,))
    assert table.values[0, 0].tolist() == [0.5, 0.75, 0.75]
    assert table.values[0, 1].tolist() == pytest.approx([math.exp(-0.1), math.exp(-0.2), math.exp(-0.2)])


def one_each(prompts, outcomes) -> list[float]:
    return [1.0] * len(outcomes)


def test_entities_are_found_as_whole_words():
    columns = {"entities": ["The Eiffel Tower", "Paris", "Rome", "art"]}
    text = "<think>the Eiffel tower stands in Paris, partly</think> Rome"
    assert one(entity_match, text, columns) == 0.75
    assert one(entity_match, text, columns, tag="think") == 0.5
    assert one(entity_match, text) is None


def test_an_early_answer_earns_more():
    found = [one(early_answer, "", tags={"turn": str(turn)}) for turn in range(5)]
    assert found == pytest.approx([0.075, 0.05, 0.025, 0, 0])


def test_a_call_without_its_end_counts_as_the_engine_makes_it():
    cut = f"<tool_call>{json.dumps(call('search', q='a'))}"
    assert one(tool_calls, cut) == 1 == len(parse_calls(cut))
