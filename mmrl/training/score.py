"""From rollouts to a reward table: every reward measures all outcomes of a round at once, side by side with
the others."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import threading
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.reward_adapters import handed
from mmrl.core.reward_table import ABSENT, RewardTable, name_id
from mmrl.core.types import Outcome, Prompt, Rollouts

TIMEOUT = 600.0  # seconds a reward may take for one round, unless its `timeout` says otherwise
SHOWN = 200  # letters of a value in a message
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)  # iterable, but not a number per outcome


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
    before = _versions(outcomes)
    results = _side_by_side(rewards, prompts, outcomes)
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
    """Number the state of every tensor of the outcomes: the number grows where one is changed in place."""
    tensors = [tensor for one in outcomes for tensor in (one.image, one.video, one.times)]
    return [t._version for t in tensors if t is not None and not t.is_inference()]


@dataclass(frozen=True)
class _Failure:
    """What a reward did instead of giving a number or None for every outcome."""

    what: str
    cause: BaseException | None = None


def _side_by_side(
    rewards: Sequence[Bound], prompts: list[Prompt], outcomes: list[Outcome]
) -> list[list | _Failure]:
    """Run every reward in a thread of its own, so that one that blocks, hangs or is cancelled is alone in
    that."""
    limits = [bound.call.get("timeout", TIMEOUT) for bound in rewards]
    results: list[list | _Failure] = [
        _Failure(f"raised TimeoutError: no answer within {limit:g} s") for limit in limits
    ]
    began = time.monotonic()

    def work(place: int) -> None:
        deadline = began + limits[place]
        result = _persistent(rewards[place], prompts, outcomes, deadline)
        if time.monotonic() < deadline:
            results[place] = result

    # Daemon threads: a reward that hangs must not keep the process alive after its time-out.
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(rewards))]
    for thread in threads:
        thread.start()
    for thread, limit in zip(threads, limits, strict=True):
        thread.join(max(0.0, began + limit - time.monotonic()))
    return list(results)


def _persistent(
    bound: Bound, prompts: list[Prompt], outcomes: list[Outcome], deadline: float
) -> list | _Failure:
    """Call a reward, again up to `retries` times where it raises; give its list, or what is wrong."""
    for left in reversed(range(1 + bound.call.get("retries", 0))):
        try:
            given = bound(*handed(prompts, outcomes))
            if inspect.isawaitable(given):
                given = asyncio.run(_awaited(given, deadline - time.monotonic()))
            return _listed(given, len(outcomes))
        # Whatever it raises ends this reward alone, SystemExit and CancelledError included.
        except BaseException as error:
            if not left or time.monotonic() >= deadline:
                return _Failure(f"raised {type(error).__name__}: {error}", error)
    raise AssertionError("the last try returns")


async def _awaited(given: Awaitable[Any], seconds: float) -> Any:
    return await asyncio.wait_for(given, seconds)


def _listed(given: Any, count: int) -> list | _Failure:
    """List what a reward gave: a list, a tuple, an iterator or an array of one dimension, `count` long."""
    shape = getattr(given, "shape", None)
    if shape is not None and len(shape) != 1:
        return _Failure(f"gave a {type(given).__name__} of shape {tuple(shape)}, not a number per outcome")
    if isinstance(given, _NO_LISTS) or not isinstance(given, Iterable):
        return _Failure(f"gave {_shown(given)}, not a number per outcome")
    if shape is not None and hasattr(given, "tolist"):
        given = given.tolist()
    listed = given if isinstance(given, (list, tuple)) else list(itertools.islice(given, count + 1))
    if len(listed) > count and listed is not given:
        return _Failure(f"gave more than {count} numbers for {count} outcomes")
    if len(listed) != count:
        return _Failure(f"gave {len(listed)} numbers for {count} outcomes")
    return list(listed)


def _checked(
    bound: Bound, result: list | _Failure, prompts: list[Prompt], outcomes: list[Outcome]
) -> tuple[Tensor, list[int]]:
    """Check what a reward gave: (M,) float64 with NaN for None, and which outcomes are faulty."""
    everywhere = list(range(len(outcomes)))
    if isinstance(result, _Failure):
        return _fault(bound, result.what, everywhere, prompts, outcomes, result.cause)
    numbers = [_number(value) for value in result]
    broken = [i for i in everywhere if result[i] is not None and not math.isfinite(numbers[i])]
    values = torch.tensor(numbers, dtype=torch.float64)
    if broken:
        _, broken = _fault(bound, f"gave {_shown(result[broken[0]])}", broken, prompts, outcomes)
        values[broken] = math.nan
    return values, broken


def _number(value: Any) -> float:
    """Read a number, also one in a tensor or array; NaN for None, for what is none, and beyond a float."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if isinstance(value, (Real, Decimal)) else math.nan
    except (ValueError, RuntimeError, OverflowError):
        return math.nan


def _shown(value: Any) -> str:
    """Write a value down for a message, not at length; classes of users and long numbers may refuse."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


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
        f"reward '{bound.name}' {what}; prompt '{prompt.uid}', outcome {_shown(text)}. "
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
