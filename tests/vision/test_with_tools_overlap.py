"""Calls of tools that begin while other conversations of a batch still generate, which changes no result."""

from __future__ import annotations

import threading
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.engines import generate as generate_module
from mmrl.vision.engines import with_tools
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_environments import WithEnvironments
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.tools import pool as tool_pool
from mmrl.vision.tools.functions import Owner, Tool
from mmrl.vision.tools.images import crop
from mmrl.vision.tools.pool import begin_calls
from mmrl.vision.tools.replies import Limits
from tests.vision import tiny
from tests.vision.playing import Ladder
from tests.vision.talking import Talkative, ruled

CALLED, HELD = Event(), Event()
SAID = []


def signal() -> str:
    """Say that it was called."""
    CALLED.set()
    return "called"


def hang() -> str:
    """Answer once the test has ended."""
    CALLED.set()
    HELD.wait(300)
    return "late"


def noted(number: int) -> str:
    """Say a number again, and note it.

    Args:
        number: Which.
    """
    SAID.append(number)
    return ruled(number)


class Asks(WithTools):
    """Every turn calls the only tool."""

    @property
    def parse(self):
        return lambda text: [Call(name, {}) for name in self.tools]


class Notes(Talkative):
    """Calls by rule of `noted` and `crop`."""

    @staticmethod
    def parse(text):
        return [
            Call("noted" if call.name == "ruled" else call.name, call.arguments)
            for call in Talkative.parse(text)
        ]


class Climbs(WithEnvironments):
    """Climbs by a rule, also with calls that cannot be made."""

    parse = staticmethod(
        lambda text: [
            Call("climb", {"rungs": len(text) % 6}),
            Call("look" if len(text) % 2 else "leap", {}),
        ][: sum(map(ord, text)) % 3]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder = self.policy.prompt_encoder
        encoder.end = [encoder.end[0], *range(0, 256, 3)]


@pytest.fixture
def policy(exact):
    policy = exact("qwen2_5_vl")
    before = policy.prompt_encoder.end
    yield policy
    policy.prompt_encoder.end = before


@pytest.fixture(autouse=True)
def fresh():
    CALLED.clear()
    HELD.clear()
    SAID.clear()
    yield
    HELD.set()


def asked(num=3, each=4):
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(num) for _ in range(each)]


def test_a_tool_begins_while_other_conversations_generate(policy, monkeypatch):
    draw, ends = generate_module.draw_tokens, [[5, 7], [7], [7], [7], [5]]  # by step and row; 5 is an end

    def drawn(logits, *args, **options):
        if len(logits) == 1:  # the other row has ended
            assert CALLED.wait(300)
        token, *values = draw(logits, *args, **options)
        return token.new_tensor(ends.pop(0)), *values

    monkeypatch.setattr(generate_module, "draw_tokens", drawn)
    policy.prompt_encoder.end = [5]
    inner = Generate(policy, stream=Stream(0), max_completion_length=20)
    engine = Asks(inner, stream=Stream(0), tool=(signal,), max_turns=2)
    talks = engine.begin([(prompt, 0) for prompt in asked(2, 1)])
    engine._choose(talks, 0, inner.converse())
    assert [talk.length for talk in talks] == [1, 5]
    engine._reply(talks, False)
    shown = [policy.prompt_encoder.transcript(talk.read.ids) for talk in talks]
    assert all("called" in text for text in shown)


@pytest.mark.parametrize("options", [{"max_turns": 1}, {"max_completion_length": 1}])
def test_calls_of_a_turn_that_is_the_last_do_not_begin(policy, monkeypatch, options):
    policy.prompt_encoder.end = list(range(320))
    begun = []
    monkeypatch.setattr(with_tools, "begin_calls", lambda calls, limits: begun.append(calls))
    inner = Generate(policy, stream=Stream(0), max_completion_length=20)
    rows = Asks(inner, stream=Stream(0), tool=(signal,), **options).rollout(asked(2, 1))
    assert [row.length for row in rows] == [1, 1] and not begun


@pytest.fixture
def clock(monkeypatch):
    """Stop the clock of calls; a test sets it forward."""
    now = [0.0]
    monkeypatch.setattr(tool_pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def begin(function, owner):
    before = {*threading.enumerate()}
    tool = replace(Tool.of(function), timeout=60, owner=owner)
    collect = begin_calls([(tool, [])], Limits(100, 100))
    new = {*threading.enumerate()} - before  # none where it has ended already
    return collect, new


def test_an_answer_in_time_counts_however_late_it_is_read(clock):
    collect, threads = begin(signal, owner := Owner())
    for thread in threads:
        thread.join(30)
    clock[0] = 1000
    ((_, answer),) = collect()
    assert not answer.fault and not owner.lost and answer.parts[0].text == "called"


def test_a_time_out_counts_from_the_beginning_of_the_call(clock):
    collect, _ = begin(hang, owner := Owner())
    assert CALLED.wait(300)
    clock[0] = 61
    ((_, answer),) = collect()  # at once: counted from here, it would wait for the tool
    assert answer.fault == "no answer within 60 s" and owner.lost


def unannounced(inner):
    """Make an engine leave `on_stop` alone, so that all calls begin after the batch."""
    answer = inner.answer
    inner.answer = lambda rows, *begin: answer([replace(row, on_stop=None) for row in rows], *begin)


MAKES = {
    "tools": lambda inner, **options: Notes(inner, stream=Stream(0), tool=(crop, noted), **options),
    "environments": lambda inner, **options: Climbs(inner, stream=Stream(0), environment=Ladder, **options),
}


@pytest.mark.parametrize("batch_size", [0, 5])
@pytest.mark.parametrize("name", MAKES)
def test_calls_that_begin_early_change_no_result(policy, name, batch_size):
    results = []
    for early in (True, False):
        SAID.clear()
        inner = Generate(policy, stream=Stream(0), max_completion_length=6, batch_size=batch_size)
        engine = MAKES[name](inner, max_turns=3, max_completion_length=14)
        begun, begin = [], engine._begin_early
        engine._begin_early = lambda *args, begun=begun, begin=begin: (begun.append(1), begin(*args))
        if not early:
            unannounced(inner)
        rows = engine.rollout(asked())
        assert bool(begun) == early
        results.append((rows, engine.pop_metrics(), sorted(SAID)))
    (rows, told, said), (others, *rest) = results
    assert [told, said] == rest and told["tools/calls"] > 0.5
    assert len({row.outcomes[-1].tags["finish"] for row in rows}) > 1
    for row, other in zip(rows, others, strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids) and row.notes.keys() == other.notes.keys()
        assert all(torch.equal(row.notes[key], other.notes[key]) for key in row.notes)
        assert row.logged == other.logged and row.length == other.length
        assert [vars_of(outcome) for outcome in row.outcomes] == [vars_of(o) for o in other.outcomes]
        assert [message.role for message in row.turns] == [message.role for message in other.turns]
        assert [image.load().pixels.tolist() for image in row.shown] == [
            image.load().pixels.tolist() for image in other.shown
        ]


def vars_of(outcome):
    log = getattr(outcome.environment, "log", None)
    return outcome.text, outcome.end, outcome.tags, outcome.recorded, log


@pytest.mark.parametrize("size", [0, 4])
def test_generate_reports_the_tokens_of_answers_that_stop(policy, size):
    policy.prompt_encoder.end = list(range(0, 256, 3))
    inner = Generate(policy, stream=Stream(0), max_completion_length=6, batch_size=size)
    heard, rows = {}, []
    for i, prompt in enumerate(asked()):
        encoded = policy.prompt_encoder.encode(prompt)
        uniform = torch.rand(6, generator=Stream(0).generator(i))
        on_stop = (lambda ids, i=i: heard.setdefault(i, []).append(ids)) if i % 5 else None
        rows.append(GenerationRequest(prompt, i, encoded, uniform, on_stop))
    answers = inner.answer(rows)
    stopped = {i for i, row in enumerate(answers) if row.outcomes[-1].tags["finish"] == "stop"}
    assert heard.keys() == {i for i in stopped if i % 5} and len(stopped) < len(rows)
    for i, (ids,) in heard.items():
        assert torch.equal(ids, answers[i].steps.ids)
    silent = inner.answer([replace(row, on_stop=None) for row in rows])
    for row, other in zip(answers, silent, strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids)
        assert all(torch.equal(row.notes[key], other.notes[key]) for key in row.notes)
