"""A pool of threads that runs tool calls, each until it returns or its timeout has passed."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.core.tool_calls import CallError
from mmrl.vision.tools.functions import Tool
from mmrl.vision.tools.replies import Answer, Limits, ToolFault, to_pil

MAX_THREADS = 64  # maximum number of concurrent calls per process
BoundCall = tuple[Tool, list[Any]]
Replies = list[tuple[Tool | None, Answer]]  # (tool, answer) per call; None for unknown tools


@dataclass(eq=False)
class Chain:
    """Tool calls that run one after another; the running call must end before `deadline`."""

    calls: Sequence[BoundCall]
    limits: Limits
    answers: list[Answer] = field(default_factory=list)
    deadline: float = math.inf

    @property
    def open(self) -> bool:
        """Whether another answer is still possible: calls are left and the deadline has not passed."""
        return len(self.answers) < len(self.calls) and time.monotonic() < self.deadline

    def begin(self) -> None:
        """Start the timeout clock of the next call, if any."""
        if len(self.answers) < len(self.calls):
            self.deadline = time.monotonic() + self.calls[len(self.answers)][0].timeout


class Pool:
    """Runs chains of tool calls in threads, at most `most` chains at a time; the others queue.

    A chain that has timed out does not count towards `most`, but its thread lives until its call returns.
    """

    def __init__(self, most: int) -> None:
        self.most, self.changed = most, threading.Condition()
        self.running: list[Chain] = []
        self.waiting: deque[Chain] = deque()

    def add(self, chains: Sequence[Chain]) -> None:
        """Queue chains of tool calls, and start as many as the limit allows."""
        with self.changed:
            self.waiting += chains
            self._start()

    def wait(self, chains: Sequence[Chain]) -> None:
        """Wait until every tool call of the chains has returned an answer or timed out."""
        with self.changed:
            self._start()
            while any(chain.open for chain in chains):
                soonest = min(chain.deadline for chain in self.running)
                self.changed.wait(max(0.0, soonest - time.monotonic()))
                self._start()

    def _start(self) -> None:
        """Start queued chains of tool calls in place of chains that have ended or timed out."""
        self.running = [chain for chain in self.running if chain.open]
        while self.waiting and len(self.running) < self.most:
            self.running.append(chain := self.waiting.popleft())
            chain.begin()
            # Use daemon threads, because a tool that hangs must not keep the process alive after its timeout.
            threading.Thread(target=self._work, args=(chain,), daemon=True).start()

    def _work(self, chain: Chain) -> None:
        """Run the tool calls of a chain one after another, until one of them has timed out."""
        for tool, arguments in chain.calls:
            answer = _with_retries(tool, arguments, chain.deadline, chain.limits)
            with self.changed:
                if time.monotonic() >= chain.deadline:
                    return  # the call timed out, so nobody waits for the answer
                chain.answers.append(answer)
                chain.begin()
                self._start()
                self.changed.notify_all()


POOL = Pool(MAX_THREADS)


def run_calls(calls: Sequence[BoundCall], limits: Limits) -> list[Answer]:
    """Run tool calls concurrently as `begin_calls` does, and wait for their answers."""
    return [answer for _, answer in begin_calls(calls, limits)()]


def begin_calls(calls: Sequence[BoundCall | CallError], limits: Limits) -> Callable[[], Replies]:
    """Start tool calls concurrently; return a function that waits for the replies.

    Calls of one owner run in order. A timeout begins when its call starts, not when the reply is read. At
    most `MAX_THREADS` calls per process run at a time. A `CallError` becomes a reply that contains the error.
    """
    places: dict[int, list[int]] = {}  # indices of the calls of each owner
    for place, call in enumerate(calls):
        if not isinstance(call, CallError):
            places.setdefault(id(call[0].owner) if call[0].owner else -place - 1, []).append(place)
    chains = [Chain([calls[place] for place in chain], limits) for chain in places.values()]
    POOL.add(chains)

    def collect() -> Replies:
        POOL.wait(chains)
        replies: Replies = [
            (None, Answer(fault=str(call)))
            if isinstance(call, CallError)
            else (call[0], Answer(fault=f"no answer within {call[0].timeout:g} s"))
            for call in calls
        ]
        for chain, at in zip(chains, places.values(), strict=True):
            for place, answer in zip(at, chain.answers, strict=False):
                replies[place] = replies[place][0], answer
            owner = chain.calls[0][0].owner
            if owner and len(chain.answers) < len(chain.calls):
                owner.lost = True
        return replies

    return collect


def _with_retries(tool: Tool, arguments: list[Any], deadline: float, limits: Limits) -> Answer:
    """Call a tool; if it raises, repeat the call up to `tool.retries` times before the deadline."""

    async def awaited(result: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(result, deadline - time.monotonic())

    for left in reversed(range(1 + tool.retries)):
        try:
            result = tool.function(*map(to_pil, arguments))
            if inspect.isawaitable(result):
                result = asyncio.run(awaited(result))
            return tool.convert(result, tool.name, limits)
        except ToolFault as fault:
            return Answer(fault=str(fault), cause=fault)
        # Catch all: even SystemExit and CancelledError end only this call.
        except BaseException as error:
            if not left or time.monotonic() >= deadline:
                return Answer(fault=f"{type(error).__name__}: {error}", cause=error)
    raise AssertionError("the last try returns")
