"""Rewards of tool calls, by the worked numbers of the papers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece, as_piece
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call, CallError, parse_calls
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.rewards.matching import transport_plan
from mmrl.rewards.tool_calls import (
    call_match,
    calls_in,
    entity_match,
    likeness,
    matched,
    retrieval_bonus,
    tool_calls,
)
from mmrl.training.method import through_chain
from mmrl.training.score import score


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def written(*calls):
    return "I look. " + " ".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in calls)


def turn(text, calls=None):
    return Message("assistant", (Part(text),), calls)


def one(piece, text, columns=None, tags=None, **options):
    prompt = Prompt("a", (), columns=columns or {})
    return piece([prompt], [Outcome(text, tags=tags or {})], **options)[0]


PREDICTED = (call("search", q="a", k=5), call("Search", q="b"), call("calc", x=1))
REFERENCE = [call("search", q="b"), call("search", q="a", k=3)]


def test_calls_are_well_formed_json_with_a_name():
    text = written(*PREDICTED) + '<tool_call>{"name": 3}</tool_call><tool_call>{oops</tool_call><tool_call>[]'
    assert [found.name for found in calls_in(turn(text))] == ["search", "Search", "calc"]
    assert one(tool_calls, text) == 3 and one(tool_calls, text, name="calc") == 1
    assert one(tool_calls, "no call") == 0
    assert calls_in(turn("<tool_call>" + "[" * 100_000 + "</tool_call>")) == []


def test_likeness_of_calls_is_the_worked_one():
    made = [Call(**each) for each in PREDICTED]
    alike = [[likeness(each, reference) for reference in REFERENCE] for each in made]
    assert alike == [[pytest.approx(0.5), pytest.approx(0.75)], [1, pytest.approx(0.375)], [0, 0]]
    assert likeness(CallError("no JSON"), REFERENCE[0]) == 0
    found = one(call_match, written(*PREDICTED), {"calls": REFERENCE})
    assert found == pytest.approx(0.583333, abs=1e-6)


def test_soft_matching_shares_references_out():
    # One call, two references: half of each, so (0.5 + 0.75) / 2. Two calls, one reference: half of it each.
    assert matched([[0.5, 0.75]], "soft") == pytest.approx([0.625])
    assert sum(matched([[1.0], [0.0]], "soft")) == pytest.approx(0.5)
    # By symmetry the plan of [[1, 0], [0, 1]] is exp(S / 0.1) over its sum, 2 (e^10 + 1).
    plan = transport_plan([[1.0, 0.0], [0.0, 1.0]])
    right = math.exp(10) / (2 * (math.exp(10) + 1))
    assert plan == [pytest.approx([right, 0.5 - right]), pytest.approx([0.5 - right, right])]
    # Two right calls have a half each: (0.5 + 0.5) / 2 in the mean over calls.
    both = written(call("search", q="a", k=3), call("search", q="b"))
    assert one(call_match, both, {"calls": REFERENCE}, matching="soft") == pytest.approx(0.5, abs=0.02)
    assert one(call_match, written(*PREDICTED), {"calls": []}, matching="soft") == 0
    assert one(call_match, "no call", {"calls": REFERENCE}, matching="soft") == 0


def test_a_plan_has_equal_rows_and_columns_and_nears_the_optimal_pairs():
    scores = [[0.5, 0.75, 0.1], [1.0, 0.375, 0.2]]
    plan = transport_plan(scores)
    assert [sum(row) for row in plan] == pytest.approx([1 / 2] * 2)
    assert [sum(column) for column in zip(*plan, strict=True)] == pytest.approx([1 / 3] * 3)
    square = [[0.9, 0.8], [0.8, 0.0]]
    near = transport_plan(square, 0.01)
    assert near == [pytest.approx([0, 0.5], abs=1e-3), pytest.approx([0.5, 0], abs=1e-3)]  # those of sum 1.6


def test_calls_without_a_reference_are_not_judged():
    assert one(call_match, written(*PREDICTED)) is None
    assert one(call_match, "no call", {"calls": REFERENCE}) == 0
    with pytest.raises(ValueError, match="wants calls like .* prompt 'a' has 'search'"):
        one(call_match, "no call", {"calls": ["search"]})


def test_retrievals_earn_less_and_less_and_copies_nothing():
    texts = ["".join(f"<search>{i}</search>" for i in range(n)) for n in range(5)]
    assert [one(retrieval_bonus, text, tag="search") for text in texts] == [0, 0.5, 0.75, 0.875, 0.9375]
    assert one(retrieval_bonus, "<search>a</search><search> a </search>", tag="search") == 0.5


def nested(piece, /, **options):
    return Pieces(Stream()).make("reward", Piece(piece, options))


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
    reward = "tests.rewards.test_tool_calls:one_each"
    cost, _ = measured(row, "cost_aware", reward=reward, tag="search", at="every")
    assert cost == [pytest.approx([math.exp(-0.1), math.exp(-0.2), math.exp(-0.2)])]


def one_each(prompts, outcomes) -> list[float]:
    return [1.0] * len(outcomes)


def test_entities_are_found_as_whole_words():
    columns = {"entities": ["The Eiffel Tower", "Paris", "Rome", "art"]}
    text = "<think>the Eiffel tower stands in Paris, partly</think> Rome"
    assert one(entity_match, text, columns) == 0.75
    assert one(entity_match, text, columns, tag="think") == 0.5
    assert one(entity_match, text) is None


def test_a_call_without_its_end_counts_as_the_engine_makes_it():
    cut = f"<tool_call>{json.dumps(call('search', q='a'))}"
    assert one(tool_calls, cut) == 1 == len(parse_calls(cut))


def said(role, text):
    return Message(role, (Part(text),))


REPLY = "<search>of a page</search>" + written(call("search", q="of a page"))


def conversation(*turns, every=False, tags=None, columns=None):
    """Make a row as `vision.with_tools` does: every turn but the last has a reply."""
    messages = [said("assistant", text) for text in turns]
    talk = [message for turn in messages[:-1] for message in (turn, said("tool", REPLY))]
    finish = ["call"] * (len(turns) - 1) + ["stop"]
    outcomes = [
        Outcome(text, end=i + 1, tags={"turn": str(i), "finish": end, **(tags or {})})
        for i, (text, end) in enumerate(zip(turns, finish, strict=True))
    ]
    prompt = Prompt("a", (), columns=columns or {})
    kept = tuple(outcomes if every else outcomes[-1:])
    return Trajectory(prompt, "a", kept, None, len(turns), turns=(*talk, messages[-1]))


def measured(row, piece, /, **options):
    """Score a row; returns the values of all outcomes, and what counts for the row."""
    table = score([nested(piece, **options)], (row,))
    (found,) = table.scored.values()
    return found.tolist(), table.at_end(piece).tolist()


SEARCHES = (written(call("search", q="a"), call("crop")), written(call("search", q="a")), "done")


@pytest.mark.parametrize("at", ["last", "every"])
@pytest.mark.parametrize("every", [False, True])
def test_calls_of_a_conversation_are_counted_however_it_is_looked_at(every, at):
    row = conversation(*SEARCHES, every=every)
    found, whole = measured(row, "tool_calls", at=at)
    assert whole == [3] and measured(row, "tool_calls", at=at, name="search")[1] == [2]
    if every and at == "every":
        assert found == [[2, 1, 0]]
    # Two different queries of three calls: 1/2 + 1/4.
    assert measured(row, "retrieval_bonus", at=at)[1] == [0.75]


def test_otc_po_reads_calls_of_all_turns_with_one_outcome_and_with_one_of_each():
    # Right answers with two calls and with one, and a wrong one without any; one call is enough, so that the
    # rewards are sin(2 pi / 3) = 0.866025, sin(pi / 2) = 1 and 0.
    look = written(call("crop"))
    for every in (False, True):
        texts = [(look, look, "1"), (look, "1"), ("0",)]
        rows = tuple(conversation(*turns, every=every) for turns in texts)
        rewards = [nested("precomputed", key="right"), nested("tool_calls", weight=0.0)]
        rows = tuple(
            replace(row, outcomes=(*row.outcomes[:-1], replace(row.outcomes[-1], recorded={"right": right})))
            for row, right in zip(rows, (1.0, 1.0, 0.0), strict=True)
        )
        rewards[0].label = "right"
        table = score(rewards, rows)
        pieces = (
            {"name": "tool_productivity", "of": "right", "calls": "tool_calls"},
            "total",
            "group_normalize",
        )
        chain = [Pieces(Stream()).make("advantage", as_piece(piece, "")) for piece in pieces]
        chain[0].function.observe(rows, table)
        made = through_chain(chain, table, 0)
        found = made.values.sum((1, 2)) if not every else made.values[:, 0, 0]
        # The mean is 0.622008, the deviation 0.542831, to which 1e-4 is added.
        assert found.tolist() == pytest.approx([0.449423, 0.696187, -1.145610], abs=2e-4)


def test_calls_are_matched_over_a_conversation_or_turn_by_turn():
    turns = (written(call("search", q="b")), written(call("search", q="a", k=3), call("calc", x=1)), "done")
    row = conversation(*turns, columns={"calls": REFERENCE})
    assert measured(row, "call_match")[0] == [
        [pytest.approx(2 / 3)]
    ]  # two of three calls are the wanted ones
    row = conversation(*turns, every=True, columns={"calls": REFERENCE})
    assert measured(row, "call_match", at="every")[0] == [[1, 0.5, 0]]
    # A call that comes again in a later turn finds its reference taken.
    turns = (written(call("search", q="b")), written(call("search", q="b")), "done")
    row = conversation(*turns, every=True, columns={"calls": REFERENCE[:1]})
    assert measured(row, "call_match", at="every")[0] == [[1, 0, 0]]


def test_a_call_that_cannot_be_read_matches_nothing():
    text = written(call("search", q="b")) + "<tool_call>{oops</tool_call>"
    assert one(call_match, text, {"calls": REFERENCE}) == 0.5
    assert one(call_match, "<tool_call>{oops</tool_call>", {"calls": REFERENCE}) == 0


def test_calls_that_got_no_answer_are_no_retrievals():
    broken = "<tool_call>{oops</tool_call>"
    turns = (SEARCHES[0] + broken, SEARCHES[1])
    for finish, count in (("stop", 3), ("turns", 2), ("tool_error", 2), ("length", 2)):
        row = conversation(*turns)
        ended = replace(row.outcomes[-1], tags={"turn": "1", "finish": finish})
        row = replace(row, outcomes=(ended,))
        cost = measured(row, "cost_aware", reward="tests.rewards.test_tool_calls:one_each")[0]
        assert cost == [[pytest.approx(math.exp(-0.1 * count))]], finish


@pytest.mark.parametrize("at", ["last", "every"])
@pytest.mark.parametrize("every", [False, True])
def test_entities_count_once_in_whatever_turn_they_are_named(every, at):
    columns = {"entities": ["Paris", "Rome"]}
    row = conversation("Paris and Rome", "Paris again", "none", every=every, columns=columns)
    assert measured(row, "entity_match", at=at)[1] == [1.0]
    row = conversation("the Eiffel", "tower", every=every, columns={"entities": ["Eiffel Tower", "tower"]})
    assert measured(row, "entity_match", at=at)[1] == [0.5]


@pytest.mark.parametrize("number", ["0", "7"])
def test_turns_of_a_game_do_not_cut_the_conversation_inside_one(number):
    # `play` numbers the turns of the game; the row is a conversation of three turns.
    row = conversation(*SEARCHES, tags={"turn": number, "episode": "a/0/0"})
    assert measured(row, "tool_calls", at="every")[1] == [3]
