"""Call of one reward function: protected arguments, context, logging, checks of its return value."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any

import torch

from mmrl.core.types import Message, Outcome, Prompt, TrainerState


def handed(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> tuple[list[Prompt], list[Outcome]]:
    """Copy the arguments of a reward, so that in-place changes do not affect other rewards.

    Lists, dictionaries, sets, tensors and arrays are copied. Pixels and times of outcomes are shared, and so
    are objects of other classes.
    """
    return [_copy(prompt) for prompt in prompts], [_copy(outcome) for outcome in outcomes]


def _copy(value: Any) -> Any:
    match value:
        case Prompt(target=target, columns=columns, answers=answers):
            return replace(value, target=_copy(target), columns=_copy(columns), answers=_copy(answers))
        case Outcome(tags=tags, recorded=recorded):
            return replace(value, tags=_copy(tags), recorded=_copy(recorded))
        case torch.Tensor():
            return value.detach().clone()
        case Mapping():
            return {key: _copy(inner) for key, inner in value.items()}
        case list():
            return [_copy(inner) for inner in value]
        case tuple() if type(value) is tuple:  # named tuples have other constructors
            return tuple(_copy(inner) for inner in value)
        case set():
            return set(value)
        case object(__array__=_):  # an array of numpy
            return copy.deepcopy(value)
    return value


@dataclass
class Scoring:
    """Context of one reward call: values that the reward can read besides its arguments, and what it logs."""

    tokens: Sequence[Sequence[int] | None] = ()  # token ids of each outcome; None if it has no tokens
    turns: Sequence[Sequence[Message]] = ()  # conversation of each outcome; may be empty
    rows: Sequence[int] = ()  # rollout index per outcome
    state: TrainerState = TrainerState()
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    deadline: float = math.inf  # value of `time.monotonic` at which the caller stops waiting

    def about(self, rows: Sequence[int]) -> Scoring:
        """Return the context of the reward call, restricted to the outcomes with these indices."""
        turns = [self.turns[i] for i in rows] if self.turns else ()
        own = [self.rows[i] for i in rows] if self.rows else ()
        return replace(self, tokens=[self.tokens[i] for i in rows], turns=turns, rows=own)

    def log_metric(self, name: str, value: float) -> None:
        """Log a value of a metric of the run; the metric is the mean of all values logged in a step."""
        number = to_float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric('{name}', {shown(value)}): a finite number is wanted")
        self.metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column, with one value per outcome, to the table of completions on disk."""
        if len(values) != len(self.tokens):
            raise ValueError(
                f"log_extra('{column}', ...): wanted {len(self.tokens)} values, one for each completion, got "
                f"{len(values)}"
            )
        self.columns[column] = list(values)


# Context of the current reward call, separate for each thread (each reward runs in one).
SCORING: ContextVar[Scoring] = ContextVar("SCORING")


def called(
    reward: Callable[..., Any],
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    call: Scoring,
    seconds: float,
) -> list:
    """Call a reward and return a list of one entry per outcome; `call` collects its metrics and columns.

    An asynchronous reward is cancelled after `seconds`. Raises `NotNumbers` for any other return value.
    """

    async def awaited(result: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(result, seconds)

    SCORING.set(call)
    result = reward(*handed(prompts, outcomes))
    if inspect.isawaitable(result):
        result = asyncio.run(awaited(result))
    return one_each(result, len(outcomes))


def by_prompt(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Group indices of outcomes by the id of their prompt."""
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.uid, []).append(i)
    return groups


# ---- return values of rewards

SHOWN = 200  # characters of a value in a message


class NotNumbers(ValueError):
    """Raised if a reward does not return one entry per outcome."""


def one_each(result: Any, count: int) -> list:
    """Convert a reward's return value (sequence, iterator or 1-D array) to a list of `count` entries.

    Raises `NotNumbers` for anything else.
    """
    match result:
        case object(shape=shape) if shape is not None and len(shape) != 1:
            kind = type(result).__name__
            raise NotNumbers(f"gave a {kind} of shape {tuple(shape)}, not a number per outcome")
        case object(shape=shape, tolist=tolist) if shape is not None:
            listed = tolist()
        case list() | tuple():
            listed = list(result)
        # Refuse iterables whose items cannot be one number per outcome.
        case str() | bytes() | bytearray() | Mapping() | Set():
            raise NotNumbers(f"gave {shown(result)}, not a number per outcome")
        case Iterable():
            listed = list(itertools.islice(result, count + 1))  # the iterator may be endless
            if len(listed) > count:
                raise NotNumbers(f"gave more than {count} numbers for {count} outcomes")
        case _:
            raise NotNumbers(f"gave {shown(result)}, not a number per outcome")
    if len(listed) != count:
        raise NotNumbers(f"gave {len(listed)} numbers for {count} outcomes")
    return listed


def to_float(value: Any) -> float:
    """Convert a number, or a tensor or array of one element, to float; NaN for any other value."""
    try:
        match value:
            case Real() | Decimal():
                return float(value)
            case object(item=item):  # a tensor or array; raises for several elements
                return to_float(item())
    except (ValueError, RuntimeError, OverflowError):
        pass
    return math.nan


def shown(value: Any) -> str:
    """Return a shortened `repr` for an error message, or the class if `repr` fails."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
