"""Rewards of tool calls, by the worked numbers of the papers."""

from __future__ import annotations

import json

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import parse_calls
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.rewards.tool_calls import (
    calls_in,
    tool_calls,
)
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


def test_calls_are_well_formed_json_with_a_name():
    text = written(*PREDICTED) + '<tool_call>{"name": 3}</tool_call><tool_call>{oops</tool_call><tool_call>[]'
    assert [found.name for found in calls_in(turn(text))] == ["search", "Search", "calc"]
    assert one(tool_calls, text) == 3 and one(tool_calls, text, name="calc") == 1
    assert one(tool_calls, "no call") == 0
    assert calls_in(turn("<tool_call>" + "[" * 100_000 + "</tool_call>")) == []


def nested(piece, /, **options):
    return Pieces(Stream()).make("reward", Piece(piece, options))


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
