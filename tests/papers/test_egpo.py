"""Function calls by syntax tree: order, spelling, several right values, and texts that run nothing."""

from __future__ import annotations

import json

import pytest

from mmrl.core.tool_calls import CallError
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError
from mmrl.papers.egpo import calls_of, function_calls, strategic_entropy
from tests.support.tables import assert_rows, reward_table

WEATHER = {"name": "weather", "arguments": {"city": "Bonn", "days": 3}}
TIME = {"name": "clock.now", "arguments": {"zone": "UTC"}}


def earns(text, target, **options):
    return function_calls([Prompt("p", (), target=target)], [Outcome(text=text)], **options)[0]


def called(*calls):
    return "".join(f"<tool_call>{c if isinstance(c, str) else json.dumps(c)}</tool_call>" for c in calls)


@pytest.mark.parametrize(
    "text",
    [
        called(WEATHER),
        called({"arguments": {"days": 3.0, "city": " Bonn "}, "name": "weather"}),
        called("weather(days=3, city='Bonn')"),
        called('[weather(city="Bonn", days=3)]'),
        called('```json\n{"name": "weather", "parameters": {"city": "Bonn", "days": 3}}\n```'),
        called({"function": {"name": "weather", "arguments": '{"city": "Bonn", "days": 3}'}}),
        "I see. " + called([WEATHER]),
    ],
)
def test_the_spelling_of_a_call_does_not_matter(text):
    assert earns(text, [WEATHER]) == 1
    assert earns(text, "weather(city='Bonn', days=3)") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weather(city='Bonn', days=3)",
        called("weather(city='Bonn')"),
        called("weather(city='Bonn', days=3, unit='C')"),
        called("weather(city='bonn', days=3)"),
        called("weather(city='Bonn', days='3')"),
        called("weather(city='Bonn', days=True)"),
        called("wheather(city='Bonn', days=3)"),
        called("weather('Bonn', 3)"),
        called(WEATHER, WEATHER),
        called("weather(city='Bonn', days=3"),
        called('{"name": "weather", "arguments": [1]}'),
        called("weather(city='Bonn', days=1 + 2)"),
        called("weather(city='Bonn', days=days)"),
        called("weather(**{'city': 'Bonn', 'days': 3})"),
    ],
)
def test_a_wrong_call_earns_nothing(text):
    assert earns(text, [WEATHER]) == 0


def test_several_calls_match_one_to_one_in_any_order():
    both = [WEATHER, TIME]
    assert earns(called(TIME, WEATHER), both) == 1
    assert earns(called("clock.now(zone='UTC'), weather(city='Bonn', days=3)"), both) == 1
    assert earns(called(f"{json.dumps(TIME)}\n{json.dumps(WEATHER)}"), both) == 1
    assert earns(called(TIME, TIME), both) == 0
    # The first call fits both; only the second leaves a place for the other.
    target = [{"name": "f", "arguments": {"x": [1, 2]}}, {"name": "f", "arguments": {"x": [1]}}]
    assert earns(called("f(x=1)", "f(x=2)"), target, allowed="list") == 1
    assert earns(called("f(x=2)", "f(x=2)"), target, allowed="list") == 0


def test_a_target_may_allow_values_and_leave_arguments_out():
    target = [{"name": "f", "arguments": {"unit": ["C", "celsius"], "days": [3, ""]}}]
    for text, value in [
        ("f(unit='C')", 1),
        ("f(unit='celsius', days=3)", 1),
        ("f(unit='F')", 0),
        ("f(days=3)", 0),
    ]:
        assert earns(called(text), target, allowed="list") == value
    assert earns(called("f(unit=['C', 'celsius'], days=[3, ''])"), target) == 1


def test_no_call_where_none_is_wanted_is_right():
    assert earns("I do not need a tool.", []) == 1
    assert earns(called(TIME), []) == 0
    assert earns("x", None) is None


def test_a_thought_can_be_demanded_and_the_whole_text_be_the_call():
    assert earns(called(TIME), [TIME], think="think") == 0
    assert earns("<think>a</think>" + called(TIME), [TIME], think="think") == 1
    assert earns("clock.now(zone='UTC')", [TIME], tag="") == 1
    row = Prompt("p", (), columns={"gold": [TIME]})
    assert function_calls([row], [Outcome(text=called(TIME))], target="gold") == [1]


def test_values_are_compared_deeply():
    target = [{"name": "f", "arguments": {"where": {"x": [1, 2.5], "on": True}, "no": None}}]
    assert earns(called("f(no=None, where={'on': True, 'x': (1.0, 2.5)})"), target) == 1
    assert earns(called("f(no=null, where={'on': True, 'x': [1, 2]})"), target) == 0
    assert earns(called("f(no=0, where={'on': 1, 'x': [1, 2.5]})"), target) == 0


def test_nothing_of_an_answer_is_run(tmp_path):
    gone = tmp_path / "x"
    for text in (
        f"f(open({str(gone)!r}, 'w'))",
        f"__import__('pathlib').Path({str(gone)!r}).touch()",
        "f(x=" + "(" * 5000 + ")" * 5000 + ")",
        "f(x=" + "[" * 900 + "]" * 900 + ")",
        '{"name": "f", "arguments": ' + "[" * 9000,
        "[" * 900 + "]" * 900,
        "f(x=9**9**9)",
        "f(" + "x=1," * 40_000 + ")",
        "f(x='\0')",
    ):
        assert earns(called(text), [WEATHER]) == 0
    assert not gone.exists()


def test_a_target_that_is_no_call_is_a_fault_of_the_row():
    with pytest.raises(RowError, match="the target of prompt 'p' is no function call: wanted a call"):
        earns("x", "1 + 1")
    with pytest.raises(RowError, match="got 3"):
        earns("x", 3)
    with pytest.raises(CallError, match="wanted a function by its name"):
        calls_of("f()()")


def test_strategic_entropy_gives_the_worked_numbers():
    entropy, think = [[0.1, 0.6, 2.0, 2.0]] * 3, [[1, 1, 1, 0]] * 3
    table = reward_table([1.0, -0.5, 0.0], length=[4] * 3, notes={"entropy": entropy, "think": think})
    wanted = [[1.04, 1.24, 1.5, 1.0], [-0.46, -0.26, -0.25, -0.5], [0.0] * 4]
    assert_rows(strategic_entropy(table).values[:, 0], wanted)
    unknown = {"entropy": [[None] * 2], "think": [[1, 1]]}
    assert_rows(strategic_entropy(reward_table([1.0], length=[2], notes=unknown)).values[:, 0], [[1, 1]])
