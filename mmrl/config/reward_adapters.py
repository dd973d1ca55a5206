"""Adapters of reward functions: for one outcome at a time, and in TRL's form."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any

import torch

from mmrl.core.answer_text import tagged  # noqa: F401 - pieces have it from here
from mmrl.core.chat import completion_of, shown_media
from mmrl.core.types import Message, Outcome, Part, Prompt, TrainerState


def handed(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> tuple[list[Prompt], list[Outcome]]:
    """Copy the arguments of a reward, so that a reward that changes them affects no other reward.

    Lists, dictionaries, sets, tensors and arrays are copied. The pixels and times of outcomes are shared, and
    so are objects of other classes.
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
        case tuple() if type(value) is tuple:  # the constructors of named tuples differ, so they are shared
            return tuple(_copy(inner) for inner in value)
        case set():
            return set(value)
        case object(__array__=_):  # an array of numpy
            return copy.deepcopy(value)
    return value


@dataclass
class Scoring:
    """One call of a reward: what it may read besides prompts and outcomes, and what it logs."""

    tokens: Sequence[Sequence[int] | None] = ()  # of every outcome; None where it is not of tokens
    turns: Sequence[Sequence[Message]] = ()  # of every outcome: its conversation; empty where there is none
    rows: Sequence[int] = ()  # of every outcome: the number of its rollout
    state: TrainerState = TrainerState()
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    deadline: float = math.inf  # of `time.monotonic`, after which nobody waits for it

    def about(self, rows: Sequence[int]) -> Scoring:
        """Take the part of the call that is about some of its outcomes."""
        turns = [self.turns[i] for i in rows] if self.turns else ()
        own = [self.rows[i] for i in rows] if self.rows else ()
        return replace(self, tokens=[self.tokens[i] for i in rows], turns=turns, rows=own)

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to a metric of the run, which is the mean of all that is logged for a step."""
        number = to_float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric('{name}', {shown(value)}): a finite number is wanted")
        self.metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions that are written, with a value for every outcome."""
        if len(values) != len(self.tokens):
            raise ValueError(
                f"log_extra('{column}', ...): wanted {len(self.tokens)} values, one for each completion, got "
                f"{len(values)}"
            )
        self.columns[column] = list(values)


# The call that is going on: a reward runs in a thread of its own, and each thread has its own value.
SCORING: ContextVar[Scoring] = ContextVar("SCORING")


def called(
    reward: Callable[..., Any],
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    call: Scoring,
    seconds: float,
) -> list:
    """Call a reward and list what it returns, one entry per outcome; `call` takes what it logs.

    An asynchronous reward has `seconds` to return. Raises `NotNumbers` for something else than entries.
    """

    async def awaited(result: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(result, seconds)

    SCORING.set(call)
    result = reward(*handed(prompts, outcomes))
    if inspect.isawaitable(result):
        result = asyncio.run(awaited(result))
    return one_each(result, len(outcomes))


def log_metric(name: str, value: float) -> None:
    """Add a number to a metric of the run, which is the mean over a step; nothing outside of a run."""
    if call := SCORING.get(None):
        call.log_metric(name, value)


def policy_turns(outcomes: Sequence[Outcome]) -> list[tuple[list[str], list[str]]]:
    """List the texts of the policy's turns up to every outcome, in the two parts of `policy_messages`."""
    both = policy_messages(outcomes)
    return [([turn.text for turn in before], [turn.text for turn in new]) for before, new in both]


def policy_messages(outcomes: Sequence[Outcome]) -> list[tuple[list[Message], list[Message]]]:
    """List the policy's turns up to every outcome that a reward is asked about, in two parts.

    First the turns up to the outcome before, of the same rollout, that it is asked about, then the new ones:
    what is counted in these adds up to the conversation, whether a reward looks `at: last` or at every turn.
    Without a conversation the text of the outcome itself is new.
    """
    scoring = SCORING.get(None) or Scoring()
    talks = scoring.turns or [()] * len(outcomes)
    parted: list[tuple[list[Message], list[Message]]] = []
    known: dict[int, int] = {}  # turns by rollout
    for outcome, talk, row in zip(outcomes, talks, scoring.rows or range(len(outcomes)), strict=True):
        turns = [turn for turn in talk if turn.role == "assistant"]
        if not talk:
            parted.append(([], [Message("assistant", (Part(outcome.text or ""),))]))
            continue
        before = known.get(row, 0)
        parted.append((turns[:before], turns[before:]))
        known[row] = len(turns)
    return parted


@dataclass(frozen=True)
class OwnAnswer:
    """The answer that the target of a prompt asks for, in the ways in which it may be written.

    Each of `texts` has to earn at least `full` marks; the answer to another target has to earn less. For a
    reward of images a text is what the image shows. `unfit` says how the target differs from what the options
    ask for, where the reward reads it all the same.
    """

    texts: tuple[str, ...]
    full: float = 1.0
    unfit: str = ""


def per_outcome(measure: Callable[..., float | None]) -> Callable[..., list[float | None]]:
    """Turn a function of one prompt and one outcome into a reward of a batch."""

    @functools.wraps(measure)
    def reward(prompts: Sequence[Prompt], outcomes: Sequence[Outcome], **options: Any) -> list[float | None]:
        return [measure(*both, **options) for both in zip(prompts, outcomes, strict=True)]

    return reward


def by_prompt(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """List the outcomes of every prompt, by its id."""
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.uid, []).append(i)
    return groups


def by_rollout(outcomes: Sequence[Outcome]) -> list[list[int]]:
    """List the outcomes of every rollout, such as the turns of a conversation, in their order."""
    rows = (SCORING.get(None) or Scoring()).rows or range(len(outcomes))
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row, []).append(i)
    return list(groups.values())


def comparable_outcomes(prompts: Sequence[Prompt]) -> list[list[int]]:
    """List the outcomes that are compared with each other: of one prompt, at one place of their rollouts.

    The k-th outcome of a rollout that a reward is asked about has the place k, so that a turn is compared
    with the same turn of other conversations, and a segment of a video with the same segment of others.
    """
    rows = (SCORING.get(None) or Scoring()).rows or range(len(prompts))
    groups: dict[tuple[str, int], list[int]] = {}
    places: Counter[int] = Counter()
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        groups.setdefault((prompt.uid, places[row]), []).append(i)
        places[row] += 1
    return list(groups.values())


TRL_OWN = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass on


def is_trl(function: Callable) -> bool:
    """Whether a function has TRL's form: it takes `completions` or `environments`."""
    return not {"completions", "environments"}.isdisjoint(inspect.signature(function).parameters)


def from_trl(function: Callable) -> Callable:
    """Wrap `f(prompts, completions, **columns)`, plain or asynchronous, as a reward.

    A prompt whose data row has messages gives messages, as in TRL, and so does its completion: of a
    conversation with tools all turns, calls and replies (see `completion_of`). Any other prompt gives a text,
    and its completion that of the last turn. Completions of image and video models are their media. Columns
    are passed by name: all of them to a function with `**kwargs`, else those that it names. So are the media
    of the prompt, as `image`, `images`, `video` and `videos` (decoded when they are read), and TRL's
    `completion_ids`, `trainer_state` (which counts optimizer steps), `log_metric` and `log_extra`, and
    `environments` where answers have any.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def completion(outcome: Outcome, messages: list | None, turns: Sequence[Message]) -> Any:
        if outcome.text is None:
            return outcome.image if outcome.video is None else outcome.video
        if messages is None:
            return outcome.text
        return completion_of(turns) or [{"role": "assistant", "content": outcome.text}]

    @functools.wraps(function)
    def reward(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> Any:
        scoring = SCORING.get(None) or Scoring([None] * len(outcomes))
        columns = dict.fromkeys(key for prompt in prompts for key in prompt.columns if key not in TRL_OWN)
        turns = scoring.turns or [()] * len(outcomes)
        rows = [prompt.columns.get("prompt") for prompt in prompts]
        messages = [row if isinstance(row, list) else None for row in rows]
        offered = (
            shown_media(prompts)
            | {name: [prompt.columns.get(name) for prompt in prompts] for name in columns}
            | {
                "prompts": [p.text if m is None else m for p, m in zip(prompts, messages, strict=True)],
                "completions": [completion(*each) for each in zip(outcomes, messages, turns, strict=True)],
                "completion_ids": [ids if ids is None else list(ids) for ids in scoring.tokens],
                "trainer_state": scoring.state,
                "log_metric": scoring.log_metric,
                "log_extra": scoring.log_extra,
                "target": [p.target for p in prompts],
            }
        )
        if any(outcome.environment is not None for outcome in outcomes):
            offered["environments"] = [outcome.environment for outcome in outcomes]
        return function(**{k: v for k, v in offered.items() if takes_all or k in parameters})

    return reward


# ---- what rewards return

SHOWN = 200  # characters of a value in a message


class NotNumbers(ValueError):
    """A reward returned something else than one entry per outcome."""


def one_each(result: Any, count: int) -> list:
    """List what a reward returned: a list, tuple, iterator or one-dimensional array of `count` entries.

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
        # These are iterable, but their parts are not a number per outcome.
        case str() | bytes() | bytearray() | Mapping() | Set():
            raise NotNumbers(f"gave {shown(result)}, not a number per outcome")
        case Iterable():
            listed = list(itertools.islice(result, count + 1))  # it may be endless
            if len(listed) > count:
                raise NotNumbers(f"gave more than {count} numbers for {count} outcomes")
        case _:
            raise NotNumbers(f"gave {shown(result)}, not a number per outcome")
    if len(listed) != count:
        raise NotNumbers(f"gave {len(listed)} numbers for {count} outcomes")
    return listed


def to_float(value: Any) -> float:
    """Convert a number, also in a tensor or array; NaN for anything else, and for what exceeds a float."""
    try:
        match value:
            case Real() | Decimal():
                return float(value)
            case object(item=item):  # of a tensor or array; it raises where there are several numbers
                return to_float(item())
    except (ValueError, RuntimeError, OverflowError):
        pass
    return math.nan


def shown(value: Any) -> str:
    """Return the `repr` of a value, shortened for a message; that of a user's class may itself fail."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
