"""From rollouts to a reward table: every reward measures all outcomes of a round at once, side by side with
the others."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.bind import Bound
from mmrl.table import ABSENT, RewardTable, name_id
from mmrl.types import Outcome, Prompt, Rollouts

TIMEOUT = 600.0  # seconds a reward may take for one round, unless its `timeout` says otherwise


class RewardFault(RuntimeError):
    """A reward raised, was too slow, or gave something that is not a finite number or None."""


def score(
    rewards: Sequence[Bound], rollouts: Rollouts, *, notes: frozenset[str] = frozenset(), rank: int = 0
) -> RewardTable:
    """Measure every outcome of rollouts with every reward, and lay the numbers out as a table.

    `notes` names what of the engine's notes the chain will read. A fault stops the run, or with `on_error:
    skip` takes the whole group out of statistics and learning.
    """
    prompts = [row.prompt for row in rollouts for _ in row.outcomes]
    outcomes = [outcome for row in rollouts for outcome in row.outcomes]
    if not rollouts:
        return RewardTable.empty().replace(rank=rank)
    columns, faults = {}, {}
    for bound, result in zip(rewards, _side_by_side(rewards, prompts, outcomes), strict=True):
        columns[bound.name], broken = _checked(bound, result, prompts, outcomes)
        if broken:
            faults[bound.name] = broken
    table = _lay_out(rollouts, columns, {b.name: b.weight for b in rewards}, rank)
    table = table.replace(notes=_notes(rollouts, notes))
    return _without_faulty_groups(table, faults) if faults else table


def _side_by_side(rewards: Sequence[Bound], prompts: list[Prompt], outcomes: list[Outcome]) -> list[Any]:
    """Run plain rewards in a thread each and asynchronous ones in one event loop. A fault is returned, not
    raised."""
    limits = [bound.call.get("timeout", TIMEOUT) for bound in rewards]
    results: list[Any] = [TimeoutError(f"no answer within {limit:g} s") for limit in limits]

    def plain(place: int) -> None:
        results[place] = _persistent(rewards[place], prompts, outcomes)

    async def patient(place: int) -> None:
        with contextlib.suppress(TimeoutError):  # what the reward itself raises is returned
            results[place] = await asyncio.wait_for(
                _persistent_async(rewards[place], prompts, outcomes), limits[place]
            )

    async def together(places: list[int]) -> None:
        await asyncio.gather(*map(patient, places))

    waiting = [i for i, bound in enumerate(rewards) if _is_async(bound.function)]
    # Daemon threads: a reward that hangs must not keep the process alive after its time-out.
    threads = {
        i: threading.Thread(target=plain, args=(i,), daemon=True)
        for i in range(len(rewards))
        if i not in waiting
    }
    if waiting:
        threads[waiting[0]] = threading.Thread(target=lambda: asyncio.run(together(waiting)), daemon=True)
    began = time.monotonic()
    for thread in threads.values():
        thread.start()
    for place, thread in threads.items():
        # The event loop watches its own limits; the second more is for a reward that blocks it.
        limit = max(limits[i] for i in waiting) + 1 if place in waiting else limits[place]
        thread.join(max(0.0, began + limit - time.monotonic()))
    return list(results)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _persistent(bound: Bound, prompts: list[Prompt], outcomes: list[Outcome]) -> Any:
    """Call a reward, again up to `retries` times where it raises; give its numbers, or the last error."""
    for left in reversed(range(1 + bound.call.get("retries", 0))):
        try:
            return bound(prompts, outcomes)
        except Exception as error:  # whatever user code raises becomes a fault that names the reward
            if not left:
                return error


async def _persistent_async(bound: Bound, prompts: list[Prompt], outcomes: list[Outcome]) -> Any:
    for left in reversed(range(1 + bound.call.get("retries", 0))):
        try:
            return await bound(prompts, outcomes)
        except Exception as error:
            if not left:
                return error


def _checked(
    bound: Bound, result: Any, prompts: list[Prompt], outcomes: list[Outcome]
) -> tuple[Tensor, list[int]]:
    """Check what a reward gave: (M,) float64 with NaN for None, and which outcomes are faulty."""
    everywhere = list(range(len(outcomes)))
    if isinstance(result, Exception):
        what = f"raised {type(result).__name__}: {result}"
        return _fault(bound, what, everywhere, prompts, outcomes, result)
    listed = result.tolist() if isinstance(result, Tensor) else result
    if not isinstance(listed, Iterable):
        return _fault(bound, f"gave {listed!r}, not a number per outcome", everywhere, prompts, outcomes)
    listed = list(listed)
    if len(listed) != len(outcomes):
        what = f"gave {len(listed)} numbers for {len(outcomes)} outcomes"
        return _fault(bound, what, everywhere, prompts, outcomes)
    numbers = [_number(value) for value in listed]
    broken = [i for i in everywhere if listed[i] is not None and not math.isfinite(numbers[i])]
    values = torch.tensor(numbers, dtype=torch.float64)
    if broken:
        _, broken = _fault(bound, f"gave {listed[broken[0]]!r}", broken, prompts, outcomes)
        values[broken] = math.nan
    return values, broken


def _number(value: Any) -> float:
    """Read a number; NaN for None and for what is none."""
    if isinstance(value, str):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _fault(
    bound: Bound,
    what: str,
    where: Sequence[int],
    prompts: list[Prompt],
    outcomes: list[Outcome],
    cause: Exception | None = None,
) -> tuple[Tensor, list[int]]:
    if bound.call.get("on_error", "raise") == "skip":
        return torch.full((len(outcomes),), math.nan, dtype=torch.float64), list(where)
    first = where[0]
    raise RewardFault(
        f"reward '{bound.name}' {what}; prompt '{prompts[first].uid}', outcome {outcomes[first].text!r}. "
        "Mend it, or set `on_error: skip` on the reward to drop such groups"
    ) from cause


def _lay_out(
    rollouts: Rollouts, columns: dict[str, Tensor], weights: dict[str, float], rank: int
) -> RewardTable:
    """Put measured numbers, ends and ids in their places."""
    places = max(len(row.outcomes) for row in rollouts)
    shape = (len(rollouts), places)
    ends = torch.full(shape, ABSENT)
    for i, row in enumerate(rollouts):
        seen = [row.length if outcome.end is None else outcome.end for outcome in row.outcomes]
        if seen != sorted(seen):
            raise ValueError(
                f"outcomes of prompt '{row.prompt.uid}' must stand in order, but their ends are {seen}"
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
    """Pad what the engine noted of every step: (N, T), NaN where it noted nothing."""
    steps = max(row.length for row in rollouts)
    notes = {}
    for name in sorted(names):
        notes[name] = torch.full((len(rollouts), steps), math.nan, dtype=torch.float64)
        for i, row in enumerate(rollouts):
            if name in row.notes:
                notes[name][i, : row.length] = row.notes[name].double()
    return notes


def _without_faulty_groups(table: RewardTable, faults: Mapping[str, list[int]]) -> RewardTable:
    """Take groups with a faulty outcome out of statistics and learning, and mark the faults of each
    reward."""
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
