"""Calls run in so many threads at a time; what hangs holds up nobody for longer than its time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from mmrl.vision.tools import pool as tool_pool
from mmrl.vision.tools.functions import Owner, Tool
from mmrl.vision.tools.pool import Pool, begin_calls, run_calls
from mmrl.vision.tools.replies import Limits

LIMITS = Limits(100, 100)
BUSY, MOST, LOCK = [0], [0], threading.Lock()


def busy(number: int) -> str:
    """Count how many run at once.

    Args:
        number: Which.
    """
    with LOCK:
        BUSY[0] += 1
        MOST[0] = max(MOST[0], BUSY[0])
    time.sleep(0.1)
    with LOCK:
        BUSY[0] -= 1
    return f"{number}"


def hang(number: int) -> str:
    """Answer too late.

    Args:
        number: Which.
    """
    time.sleep(5)
    return "late"


@pytest.fixture
def pool(monkeypatch):
    def make(most):
        MOST[0] = 0
        monkeypatch.setattr(tool_pool, "POOL", made := Pool(most))
        return made

    return make


def answers_of(collect):
    return [answer for _, answer in collect()]


def said(answers):
    return [answer.fault or answer.parts[0].text for answer in answers]


def test_calls_of_several_turns_share_a_number_of_threads(pool):
    pool(3)
    tool = Tool.of(busy)
    before = threading.active_count()
    begun = [begin_calls([(tool, [i]), (tool, [i + 1])], LIMITS) for i in range(0, 12, 2)]
    assert threading.active_count() <= before + 3
    assert [said(answers_of(collect)) for collect in begun] == [[f"{i}", f"{i + 1}"] for i in range(0, 12, 2)]
    assert 0 < MOST[0] <= 3


def test_the_time_of_a_call_begins_when_it_runs(pool):
    pool(1)
    tool = replace(Tool.of(busy), timeout=2.0)
    calls = [(tool, [i]) for i in range(25)]  # 2.5 s in all
    assert said(run_calls(calls, LIMITS)) == [str(i) for i in range(25)]


def test_a_call_that_hangs_gives_its_place_to_the_next(pool):
    pool(1)
    hangs, owner = replace(Tool.of(hang), timeout=0.2), Owner()
    mine = replace(hangs, owner=owner), replace(Tool.of(busy), owner=owner, timeout=7)
    last = begin_calls([(tool, [0]) for tool in mine], LIMITS)
    first = begin_calls([(Tool.of(busy), [1])], LIMITS)
    assert said(answers_of(first)) == ["1"]  # which is asked for before the one that hangs
    assert said(answers_of(last)) == ["no answer within 0.2 s", "no answer within 7 s"] and owner.lost
