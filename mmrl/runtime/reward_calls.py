"""Concurrent reward calls with timeouts and retries, each for the outcomes that the reward applies to."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.core.types import Outcome, Prompt
from mmrl.runtime.scoring import NotNumbers, Scoring, called, shown, to_float

TIMEOUT = 600.0  # default seconds that a reward may take for one round (option `timeout`)


class RewardFault(RuntimeError):
    """Raised if a reward raises, times out, or returns anything other than finite numbers or None."""


class RemoteFault(Exception):
    """The error of a reward that runs in another process.

    Args:
        kind: Class name of the original exception.
        message: Message of the original exception.
        trace: Traceback of the original exception.
        lasting: Whether later calls would fail as well, because the processes are lost.
    """

    def __init__(self, kind: str, message: str, trace: str = "", *, lasting: bool = False) -> None:
        super().__init__(message)
        self.kind, self.trace, self.lasting = kind, trace, lasting


class RemoteReward:
    """Base class of rewards that run in other processes."""

    def wait(self) -> None:
        """Wait until the processes have started."""


@dataclass(frozen=True)
class Result:
    """The return value of a reward, one entry per outcome, or its failure."""

    values: list = field(default_factory=list)
    logged: Scoring = field(default_factory=Scoring)
    failure: str = ""
    cause: BaseException | None = None
    lasting: bool = False  # later calls will fail, too: raise despite `on_error: skip`


def call_all(
    rewards: Sequence[Bound],
    prompts: list[Prompt],
    outcomes: list[Outcome],
    final: list[bool],
    scoring: Scoring,
) -> list[Result]:
    """Call every reward in a separate thread, so that a hanging reward does not delay the others."""
    for bound in rewards:  # wait for remote processes before the timeouts start
        if isinstance(bound.function, RemoteReward):
            bound.function.wait()
    limits = [bound.call.get("timeout", TIMEOUT) for bound in rewards]
    results = [Result(failure=f"raised TimeoutError: no answer within {limit:g} s") for limit in limits]
    began = time.monotonic()

    def work(place: int) -> None:
        deadline = began + limits[place]
        result = _call_where_it_applies(rewards[place], prompts, outcomes, final, deadline, scoring)
        if time.monotonic() < deadline:
            results[place] = result

    # Daemon threads: a reward that hangs must not keep the process alive after its time-out.
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(rewards))]
    for thread in threads:
        thread.start()
    for thread, limit in zip(threads, limits, strict=True):
        thread.join(max(0.0, began + limit - time.monotonic()))
    return list(results)  # a copy: late threads may still write into `results`


def _call_where_it_applies(
    bound: Bound,
    prompts: list[Prompt],
    outcomes: list[Outcome],
    final: list[bool],
    deadline: float,
    scoring: Scoring,
) -> Result:
    """Call a reward for the outcomes that its settings `where` and `at` select; other outcomes get None."""
    triples = enumerate(zip(prompts, outcomes, final, strict=True))
    rows = [i for i, triple in triples if _applies(bound, *triple)]
    if len(rows) == len(outcomes):
        return _with_retries(bound, prompts, outcomes, deadline, scoring)
    if not rows:
        return Result([None] * len(outcomes), Scoring(scoring.tokens))
    chosen = [prompts[i] for i in rows], [outcomes[i] for i in rows]
    result = _with_retries(bound, *chosen, deadline, scoring.about(rows))

    def spread(values: Sequence[Any]) -> list[Any]:
        by_row = dict(zip(rows, values, strict=True))
        return [by_row.get(i) for i in range(len(outcomes))]

    columns = {name: spread(values) for name, values in result.logged.columns.items()}
    values = result.values if result.failure else spread(result.values)
    return replace(result, values=values, logged=replace(result.logged, columns=columns))


def _applies(bound: Bound, prompt: Prompt, outcome: Outcome, final: bool) -> bool:
    """Whether a reward's settings `where` and `at` select an outcome."""
    where, at = bound.call.get("where"), bound.call.get("at", "last")
    if where and not matches(prompt, where):
        return False
    if at == "last":
        return final
    tag, equals, word = at.partition("=")
    return at == "every" or (outcome.tags.get(tag) == word if equals else bool(outcome.tags.get(tag)))


def matches(prompt: Prompt, where: Mapping[str, Any]) -> bool:
    """Whether a prompt has the value, or one of the list of values, that `where` names for each column."""

    def fits(value: Any, wanted: Any) -> bool:
        return value in wanted if isinstance(wanted, list | tuple) else value == wanted

    return all(fits(prompt.columns.get(name), wanted) for name, wanted in where.items())


def _with_retries(
    bound: Bound, prompts: list[Prompt], outcomes: list[Outcome], deadline: float, scoring: Scoring
) -> Result:
    """Call a reward; if it raises, call it again up to `retries` times before the deadline."""
    for left in reversed(range(1 + bound.call.get("retries", 0))):
        # Drop what a failed attempt logged.
        call = replace(scoring, metrics={}, columns={}, deadline=deadline)
        try:
            return Result(called(bound, prompts, outcomes, call, deadline - time.monotonic()), call)
        except NotNumbers as error:
            return Result(failure=str(error))
        except RemoteFault as error:
            if error.lasting:
                return Result(failure=f"cannot go on: {error}", cause=error, lasting=True)
            if not left or time.monotonic() >= deadline:
                return Result(failure=f"raised {error.kind}: {error}", cause=error)
        # Any exception ends only this reward, even SystemExit and CancelledError.
        except BaseException as error:
            if not left or time.monotonic() >= deadline:
                return Result(failure=f"raised {type(error).__name__}: {error}", cause=error)
    raise AssertionError("the last try returns")


def checked(
    bound: Bound, result: Result, prompts: list[Prompt], outcomes: list[Outcome]
) -> tuple[Tensor, list[int]]:
    """Convert values to float64 (outcomes,), NaN for None; also return the indices of faulty outcomes."""
    if result.failure:
        what, numbers, broken = result.failure, [math.nan] * len(outcomes), list(range(len(outcomes)))
    else:
        numbers = [to_float(value) for value in result.values]
        broken = [i for i, x in enumerate(numbers) if result.values[i] is not None and not math.isfinite(x)]
        what = f"gave {shown(result.values[broken[0]])}" if broken else ""
    if what and (result.lasting or bound.call.get("on_error", "raise") != "skip"):
        raise RewardFault(
            f"reward '{bound.name}' {what}; prompt '{prompts[broken[0]].uid}', outcome "
            f"{shown(outcomes[broken[0]].text)}. Mend it, or set `on_error: skip` on the reward to drop such "
            "groups"
        ) from result.cause
    values = torch.tensor(numbers, dtype=torch.float64)
    return torch.where(values.isfinite(), values, math.nan), broken
