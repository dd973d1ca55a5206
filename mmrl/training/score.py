"""Scores rollouts: calls all rewards at the same time, checks what they return, makes a reward table."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.reward_adapters import NotNumbers, handed, one_each, shown, to_float
from mmrl.core.reward_table import ABSENT, RewardTable, name_id
from mmrl.core.types import Outcome, Prompt, Rollouts

TIMEOUT = 600.0  # seconds a reward may take for one round, unless its `timeout` says otherwise


class RewardFault(RuntimeError):
    """A reward raised an exception, timed out, or returned something else than finite numbers or None."""


def score(
    rewards: Sequence[Bound], rollouts: Rollouts, *, notes: frozenset[str] = frozenset(), rank: int = 0
) -> RewardTable:
    """Measure every outcome of rollouts with every reward.

    `notes` names the engine's notes that the advantage chain reads, `rank` is this process. A reward that
    fails stops the run with `RewardFault`; with `on_error: skip` the whole group is left out of statistics
    and learning.
    """
    prompts = [row.prompt for row in rollouts for _ in row.outcomes]
    outcomes = [outcome for row in rollouts for outcome in row.outcomes]
    if not rollouts:
        return RewardTable.empty().replace(rank=rank)
    columns, faults = {}, {}
    before = _versions(outcomes)
    results = _concurrently(rewards, prompts, outcomes)
    if _versions(outcomes) != before:
        raise RewardFault(
            f"one of the rewards {', '.join(bound.name for bound in rewards)} changed the pixels or times of "
            "outcomes in place, which all rewards and the report share; let it work on a copy"
        )
    for bound, result in zip(rewards, results, strict=True):
        columns[bound.name], broken = _checked(bound, result, prompts, outcomes)
        if broken:
            faults[bound.name] = broken
    table = _lay_out(rollouts, columns, {b.name: b.weight for b in rewards}, rank)
    table = table.replace(notes=_notes(rollouts, notes))
    return _without_faulty_groups(table, faults) if faults else table


def _versions(outcomes: Sequence[Outcome]) -> list[int]:
    """List the version counters of the tensors of outcomes, which grow when one is changed in place."""
    tensors = [t for outcome in outcomes for t in (outcome.image, outcome.video, outcome.times)]
    return [t._version for t in tensors if t is not None and not t.is_inference()]


@dataclass(frozen=True)
class _Result:
    """What a reward returned: one entry per outcome, or what it did instead."""

    values: list = field(default_factory=list)
    failure: str = ""
    cause: BaseException | None = None


def _concurrently(rewards: Sequence[Bound], prompts: list[Prompt], outcomes: list[Outcome]) -> list[_Result]:
    """Call every reward in a thread of its own, so that one that hangs delays no other."""
    limits = [bound.call.get("timeout", TIMEOUT) for bound in rewards]
    results = [_Result(failure=f"raised TimeoutError: no answer within {limit:g} s") for limit in limits]
    began = time.monotonic()

    def work(place: int) -> None:
        deadline = began + limits[place]
        result = _with_retries(rewards[place], prompts, outcomes, deadline)
        if time.monotonic() < deadline:
            results[place] = result

    # Daemon threads: a reward that hangs must not keep the process alive after its time-out.
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(rewards))]
    for thread in threads:
        thread.start()
    for thread, limit in zip(threads, limits, strict=True):
        thread.join(max(0.0, began + limit - time.monotonic()))
    return list(results)


def _with_retries(bound: Bound, prompts: list[Prompt], outcomes: list[Outcome], deadline: float) -> _Result:
    """Call a reward, and again up to `retries` times while it raises."""
    for left in reversed(range(1 + bound.call.get("retries", 0))):
        try:
            result = bound(*handed(prompts, outcomes))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result, deadline - time.monotonic()))
            return _Result(one_each(result, len(outcomes)))
        except NotNumbers as error:
            return _Result(failure=str(error))
        # Whatever it raises ends this reward alone, SystemExit and CancelledError included.
        except BaseException as error:
            if not left or time.monotonic() >= deadline:
                return _Result(failure=f"raised {type(error).__name__}: {error}", cause=error)
    raise AssertionError("the last try returns")


async def _awaited(result: Awaitable[Any], seconds: float) -> Any:
    return await asyncio.wait_for(result, seconds)


def _checked(
    bound: Bound, result: _Result, prompts: list[Prompt], outcomes: list[Outcome]
) -> tuple[Tensor, list[int]]:
    """Convert what a reward returned to (M,) float64, NaN for None, and list the faulty outcomes."""
    everywhere = list(range(len(outcomes)))
    if result.failure:
        return _fault(bound, result.failure, everywhere, prompts, outcomes, result.cause)
    numbers = [to_float(value) for value in result.values]
    broken = [i for i in everywhere if result.values[i] is not None and not math.isfinite(numbers[i])]
    values = torch.tensor(numbers, dtype=torch.float64)
    if broken:
        _, broken = _fault(bound, f"gave {shown(result.values[broken[0]])}", broken, prompts, outcomes)
        values[broken] = math.nan
    return values, broken


def _fault(
    bound: Bound,
    what: str,
    where: Sequence[int],
    prompts: list[Prompt],
    outcomes: list[Outcome],
    cause: BaseException | None = None,
) -> tuple[Tensor, list[int]]:
    if bound.call.get("on_error", "raise") == "skip":
        return torch.full((len(outcomes),), math.nan, dtype=torch.float64), list(where)
    prompt, text = prompts[where[0]], outcomes[where[0]].text
    raise RewardFault(
        f"reward '{bound.name}' {what}; prompt '{prompt.uid}', outcome {shown(text)}. "
        "Mend it, or set `on_error: skip` on the reward to drop such groups"
    ) from cause


def _lay_out(
    rollouts: Rollouts, columns: dict[str, Tensor], weights: dict[str, float], rank: int
) -> RewardTable:
    """Make the table of measured rewards, with the ends and ids of outcomes."""
    places = max(len(row.outcomes) for row in rollouts)
    shape = (len(rollouts), places)
    ends = torch.full(shape, ABSENT)
    for i, row in enumerate(rollouts):
        seen = [row.length if outcome.end is None else outcome.end for outcome in row.outcomes]
        if seen != sorted(seen):
            raise ValueError(
                f"outcomes of prompt '{row.prompt.uid}' must be in order, but their ends are {seen}"
            )
        ends[i, : len(seen)] = torch.tensor(seen)
    present = ends != ABSENT
    scored = {
        name: torch.full(shape, math.nan, dtype=torch.float64).masked_scatter(present, values)
        for name, values in columns.items()
    }
    names = tuple(name for name in columns if weights[name] != 0)
    nothing = torch.zeros((len(rollouts), 0, places), dtype=torch.float64)  # labels only
    values = torch.stack([scored[name] for name in names], 1) if names else nothing
    return RewardTable(
        values=values.nan_to_num(),
        valid=~values.isnan() & present[:, None],
        names=names,
        scored=scored,
        weights=torch.tensor([weights[name] for name in names], dtype=torch.float64),
        ends=ends,
        ids=_ids(rollouts, shape),
        notes={},
        length=torch.tensor([row.length for row in rollouts]),
        learn=present,
        uids=tuple(row.prompt.uid for row in rollouts),
        process=torch.full(shape[:1], rank),
        rank=rank,
    )


def _ids(rollouts: Rollouts, shape: tuple[int, int]) -> dict[str, Tensor]:
    def column(values: list[int]) -> Tensor:
        return torch.tensor(values)[:, None].expand(shape)

    ids = {
        "group": column([name_id(row.group) for row in rollouts]),
        "row": column(list(range(shape[0]))),
        "place": torch.arange(shape[1]).expand(shape),
        "on_policy": column([int(row.on_policy) for row in rollouts]),
    }
    for tag in sorted({tag for row in rollouts for outcome in row.outcomes for tag in outcome.tags}):
        ids[tag] = torch.zeros(shape, dtype=torch.int64)
        for i, row in enumerate(rollouts):
            for k, outcome in enumerate(row.outcomes):
                ids[tag][i, k] = name_id(outcome.tags.get(tag, ""))
    return ids


def _notes(rollouts: Rollouts, names: frozenset[str]) -> dict[str, Tensor]:
    """Pad the engine's notes on every step to (N, T), NaN where there are none."""
    steps = max(row.length for row in rollouts)
    notes = {}
    for name in sorted(names):
        notes[name] = torch.full((len(rollouts), steps), math.nan, dtype=torch.float64)
        for i, row in enumerate(rollouts):
            if name in row.notes:
                notes[name][i, : row.length] = row.notes[name].double()
    return notes


def _without_faulty_groups(table: RewardTable, faults: Mapping[str, list[int]]) -> RewardTable:
    """Leave groups with a faulty outcome out of statistics and learning, and mark the faults by reward."""
    marks = {}
    for name, broken in faults.items():
        faulty = torch.zeros(int(table.present.sum()), dtype=torch.int64)
        faulty[broken] = 1
        marks[f"fault/{name}"] = torch.zeros_like(table.ends).masked_scatter(table.present, faulty)
    broken = table.group[torch.stack(list(marks.values())).any(0).any(-1)]
    sound = ~torch.isin(table.group, broken)
    return table.replace(
        ids={**table.ids, **marks},
        valid=table.valid & sound[:, None, None],
        learn=table.learn & sound[:, None],
    )
