"""Running the calls of tools: in threads, so many at a time, each until it answers or is out of time."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from mmrl.vision.tool_calls import Tool
from mmrl.vision.tool_replies import Answer, Limits, ToolFault, to_pil

MAX_THREADS = 64  # calls of a process that run at the same time


@dataclass(eq=False)
class Chain:
    """Calls that are made one after another; the one that runs has time until `deadline`."""

    calls: Sequence[tuple[Tool, list[Any]]]
    limits: Limits
    answers: list[Answer] = field(default_factory=list)
    deadline: float = math.inf

    @property
    def open(self) -> bool:
        """Whether another answer may come."""
        return len(self.answers) < len(self.calls) and time.monotonic() < self.deadline

    def begin(self) -> None:
        """Begin the time of the next call, if there is one."""
        if len(self.answers) < len(self.calls):
            self.deadline = time.monotonic() + self.calls[len(self.answers)][0].timeout


class Pool:
    """Runs chains of calls in threads, at most `most` at a time; the others wait in their order.

    A chain that is out of time leaves its place to the next one. Its thread ends once the call returns.
    """

    def __init__(self, most: int) -> None:
        self.most, self.changed = most, threading.Condition()
        self.running: list[Chain] = []
        self.waiting: deque[Chain] = deque()

    def add(self, chains: Sequence[Chain]) -> None:
        """Run chains, as soon as there is place."""
        with self.changed:
            self.waiting += chains
            self._start()

    def wait(self, chains: Sequence[Chain]) -> None:
        """Wait until every call of chains has its answer or is out of time."""
        with self.changed:
            self._start()
            while any(chain.open for chain in chains):
                soonest = min(chain.deadline for chain in self.running)
                self.changed.wait(max(0.0, soonest - time.monotonic()))
                self._start()

    def _start(self) -> None:
        """Start chains that wait in the places of those that have ended or are out of time."""
        self.running = [chain for chain in self.running if chain.open]
        while self.waiting and len(self.running) < self.most:
            self.running.append(chain := self.waiting.popleft())
            chain.begin()
            # Daemon threads: a tool that hangs must not keep the process alive after its time-out.
            threading.Thread(target=self._work, args=(chain,), daemon=True).start()

    def _work(self, chain: Chain) -> None:
        for tool, arguments in chain.calls:
            answer = _with_retries(tool, arguments, chain.deadline, chain.limits)
            with self.changed:
                if time.monotonic() >= chain.deadline:
                    return  # nobody waits for it
                chain.answers.append(answer)
                chain.begin()
                self._start()
                self.changed.notify_all()


POOL = Pool(MAX_THREADS)


def run_calls(calls: Sequence[tuple[Tool, list[Any]]], limits: Limits) -> list[Answer]:
    """Run calls as `begin_calls` does, and wait for their answers."""
    return begin_calls(calls, limits)()


def begin_calls(calls: Sequence[tuple[Tool, list[Any]]], limits: Limits) -> Callable[[], list[Answer]]:
    """Begin calls at the same time, those of one owner in order; returns a function that gets the answers.

    It waits until every call has its answer or is out of time, which is counted from the beginning of the
    call, however late answers are asked for. Of all calls of the process `MAX_THREADS` run at a time; one
    that hangs delays others until its time is over.
    """
    places: dict[int, list[int]] = {}  # the calls of every owner
    for place, (tool, _) in enumerate(calls):
        places.setdefault(id(tool.owner) if tool.owner else -place - 1, []).append(place)
    chains = [Chain([calls[place] for place in chain], limits) for chain in places.values()]
    POOL.add(chains)

    def collect() -> list[Answer]:
        POOL.wait(chains)
        answers = [Answer(fault=f"no answer within {tool.timeout:g} s") for tool, _ in calls]
        for chain, at in zip(chains, places.values(), strict=True):
            for place, answer in zip(at, chain.answers, strict=False):
                answers[place] = answer
            owner = chain.calls[0][0].owner
            if owner and len(chain.answers) < len(chain.calls):
                owner.lost = True
        return answers

    return collect


def _with_retries(tool: Tool, arguments: list[Any], deadline: float, limits: Limits) -> Answer:
    async def awaited(result: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(result, deadline - time.monotonic())

    for left in reversed(range(1 + tool.retries)):
        try:
            given = [to_pil(argument) for argument in arguments]  # images may be read from any file
            with tool.rights.held() if tool.rights else nullcontext():
                result = tool.function(*given)
                if inspect.isawaitable(result):
                    result = asyncio.run(awaited(result))
            return tool.convert(result, tool.name, limits)
        except ToolFault as fault:
            return Answer(fault=str(fault), cause=fault)
        # Whatever it raises ends this call alone, SystemExit and CancelledError included.
        except BaseException as error:
            if not left or time.monotonic() >= deadline:
                return Answer(fault=f"{type(error).__name__}: {error}", cause=error)
    raise AssertionError("the last try returns")
