"""Calls rewards: all at the same time, about the outcomes that each applies to, again where it raised."""

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
from mmrl.runtime.ray_actors import ActorsLost
from mmrl.runtime.ray_rewards import RemoteFault, ready
from mmrl.runtime.scoring import NotNumbers, Scoring, called, shown, to_float

TIMEOUT = 600.0  # seconds a reward may take for one round, unless its `timeout` says otherwise


class RewardFault(RuntimeError):
    """A reward raised an exception, timed out, or returned something else than finite numbers or None."""


@dataclass(frozen=True)
class Result:
    """What a reward returned: one entry per outcome, or what it did instead."""

    values: list = field(default_factory=list)
    logged: Scoring = field(default_factory=Scoring)
    failure: str = ""
    cause: BaseException | None = None
    lasting: bool = False  # later calls would fail as well, so the setting `on_error: skip` would drop all


def call_all(
    rewards: Sequence[Bound],
    prompts: list[Prompt],
    outcomes: list[Outcome],
    final: list[bool],
    scoring: Scoring,
) -> list[Result]:
    """Call every reward in a thread of its own, so that one that hangs delays no other."""
    ready(rewards)
    limits = [bound.call.get("timeout", TIMEOUT) for bound in rewards]
    results = [Result(failure=f"raised TimeoutError: no answer within {limit:g} s") for limit in limits]
    began = time.monotonic()

    def work(place: int) -> None:
        deadline = began + limits[place]
        asked = [
            _applies(rewards[place], prompt, outcome, last)
            for prompt, outcome, last in zip(prompts, outcomes, final, strict=True)
        ]
        result = _where_it_applies(rewards[place], prompts, outcomes, asked, deadline, scoring)
        if time.monotonic() < deadline:
            results[place] = result

    # Daemon threads: a reward that hangs must not keep the process alive after its time-out.
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(rewards))]
    for thread in threads:
        thread.start()
    for thread, limit in zip(threads, limits, strict=True):
        thread.join(max(0.0, began + limit - time.monotonic()))
    return list(results)  # a late thread still writes into the other list


def _where_it_applies(
    bound: Bound,
    prompts: list[Prompt],
    outcomes: list[Outcome],
    asked: list[bool],
    deadline: float,
    scoring: Scoring,
) -> Result:
    """Call a reward for some of the outcomes; the others get None."""
    if all(asked):
        return _with_retries(bound, prompts, outcomes, deadline, scoring)
    rows = [i for i, it_is in enumerate(asked) if it_is]
    if not rows:
        return Result([None] * len(outcomes), Scoring(scoring.tokens))
    given, made = [prompts[i] for i in rows], [outcomes[i] for i in rows]
    result = _with_retries(bound, given, made, deadline, scoring.about(rows))

    def spread(values: Sequence[Any]) -> list[Any]:
        by_row = dict(zip(rows, values, strict=True))
        return [by_row.get(i) for i in range(len(outcomes))]

    columns = {name: spread(values) for name, values in result.logged.columns.items()}
    values = result.values if result.failure else spread(result.values)
    return replace(result, values=values, logged=replace(result.logged, columns=columns))


def _applies(bound: Bound, prompt: Prompt, outcome: Outcome, final: bool) -> bool:
    """Whether a reward is asked about an outcome, by its settings `where` and `at`."""
    where, at = bound.call.get("where"), bound.call.get("at", "last")
    if where and not matches(prompt, where):
        return False
    if at == "last":
        return final
    tag, equals, word = at.partition("=")
    return at == "every" or (outcome.tags.get(tag) == word if equals else bool(outcome.tags.get(tag)))


def matches(prompt: Prompt, where: Mapping[str, Any]) -> bool:
    """Whether a prompt has the value, or one of the values, that is wanted in every column."""
    for name, wanted in where.items():
        value = prompt.columns.get(name)
        match wanted:
            case [*several]:
                if value not in several:
                    return False
            case _ if value != wanted:
                return False
    return True


def _with_retries(
    bound: Bound, prompts: list[Prompt], outcomes: list[Outcome], deadline: float, scoring: Scoring
) -> Result:
    """Call a reward, and again up to `retries` times while it raises."""

    for left in reversed(range(1 + bound.call.get("retries", 0))):
        # What a try logs that fails is dropped.
        call = replace(scoring, metrics={}, columns={}, deadline=deadline)
        try:
            return Result(called(bound, prompts, outcomes, call, deadline - time.monotonic()), call)
        except NotNumbers as error:
            return Result(failure=str(error))
        except ActorsLost as error:
            return Result(failure=f"cannot go on: {error}", cause=error, lasting=True)
        except RemoteFault as error:
            if not left or time.monotonic() >= deadline:
                return Result(failure=f"raised {error.kind}: {error}", cause=error)
        # Whatever it raises ends this reward alone, SystemExit and CancelledError included.
        except BaseException as error:
            if not left or time.monotonic() >= deadline:
                return Result(failure=f"raised {type(error).__name__}: {error}", cause=error)
    raise AssertionError("the last try returns")


def checked(
    bound: Bound, result: Result, prompts: list[Prompt], outcomes: list[Outcome]
) -> tuple[Tensor, list[int]]:
    """Convert what a reward returned to (M,) float64, NaN for None, and list the faulty outcomes."""
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
