"""Environments of conversations, in TRL's form: how one is begun, called and asked for a reward."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from mmrl.config.binding import Bound
from mmrl.config.schema import ConfigError
from mmrl.core.types import Media, Part, Prompt
from mmrl.vision.tool_calls import TIMEOUT, Owner, Tool
from mmrl.vision.tool_functions import check_environment, tool_names
from mmrl.vision.tool_replies import Answer, Limits, ToolFault, as_parts, content_of, to_pil
from mmrl.vision.tool_rights import Rights

NOTHING = inspect.Signature()


@dataclass(frozen=True, eq=False)
class Environment:
    """A kind of environment: how one is made, what a model may call, and how faults are met.

    Args:
        name: What its reward and rows are called: the label, or else the name of the class.
        make: Makes one.
        takes: The parameters of its `reset`.
        tools: Its tools, of an environment that was made to look at.
        scores: Whether it has `get_reward`.
        timeout: Seconds for each of its methods.
        retries: Further tries of `reset` after an exception, each with a new environment.
        on_error: As that of a tool.
        rights: What its methods may do, as those of a tool.
    """

    name: str
    make: Callable[[], Any]
    takes: Mapping[str, inspect.Parameter]
    tools: tuple[Tool, ...]
    scores: bool
    timeout: float = TIMEOUT
    retries: int = 0
    on_error: str = "tell"
    rights: Rights | None = None

    @staticmethod
    def of(factory: Callable[[], Any]) -> Environment:
        """Make a kind of environment of a class or a function, or of one that a configuration named."""
        name, call = getattr(factory, "__name__", type(factory).__name__), {}
        match factory:
            case Bound(entry=entry, options=options, call=given):
                name = factory.name
                call = {key: given[key] for key in ("timeout", "retries", "on_error") if key in given}
                shipped = entry.target.__module__.startswith("mmrl.")
                call["rights"] = Rights.declared(given, options, shipped=shipped)
        probe = factory()
        check_environment(type(probe), name)
        tools = [Tool.of(getattr(probe, method)) for method in tool_names(type(probe))]
        own = {key: value for key, value in call.items() if key != "retries"}  # an action is made once
        return Environment(
            name,
            factory,
            inspect.signature(probe.reset).parameters,
            tuple(replace(tool, **own) for tool in tools),
            callable(getattr(probe, "get_reward", None)),
            **call,
        )


@dataclass(eq=False)
class Episode(Owner):
    """An environment of one conversation; `lost` once a call of it has not come back in time.

    Args:
        kind: The kind of environment.
        seed: What its beginning draws from.
        environment: The object, made by `begin`.
    """

    kind: Environment = field(kw_only=True)
    seed: int = field(kw_only=True)
    environment: Any = None

    def tools(self) -> dict[str, Tool]:
        """List what the model may call, by name."""
        own = ((tool, getattr(self.environment, tool.name)) for tool in self.kind.tools)
        return {tool.name: replace(tool, function=method, owner=self) for tool, method in own}

    def begin(self, columns: Mapping[str, Any], images: Sequence[Media], others: Owner) -> Tool:
        """Prepare the call that makes the environment and resets it, in turn with those of `others`.

        One whose `reset` takes no `seed` draws from the global generators of Python and numpy, so it is begun
        by itself, with these seeded.
        """
        given = self._given(columns, images)

        def reset() -> Any:
            self.environment = self.kind.make()
            return self.environment.reset(**given)

        def seeded() -> Any:
            with global_seed(self.seed):  # a coroutine draws while it runs, so that it has to end in here
                shown = reset()
                return asyncio.run(awaited(shown)) if inspect.isawaitable(shown) else shown

        async def awaited(shown: Awaitable[Any]) -> Any:
            return await asyncio.wait_for(shown, self.kind.timeout)

        own = "seed" in given
        return self._call("reset", reset if own else seeded, as_observation, None if own else others)

    def ask(self) -> Tool:
        """Prepare the call that asks the environment for its reward."""
        return self._call("get_reward", self.environment.get_reward, as_reward)

    def _call(
        self, name: str, function: Callable, convert: Callable[..., Answer], owner: Owner | None = None
    ) -> Tool:
        kind = self.kind
        retries = kind.retries if name == "reset" else 0
        limits: dict[str, Any] = {"timeout": kind.timeout, "retries": retries, "on_error": kind.on_error}
        limits["rights"] = kind.rights
        return Tool(name, function, NOTHING, {}, frozenset(), {}, **limits, owner=owner, convert=convert)

    def _given(self, columns: Mapping[str, Any], images: Sequence[Media]) -> dict[str, Any]:
        """Collect what `reset` takes: copies of the columns of the row and of its images, and `seed`."""
        takes = self.kind.takes
        everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        given = {key: copy.deepcopy(v) for key, v in columns.items() if everything or key in takes}
        if takes.keys() & {"image", "images"}:
            shown: dict[str, Any] = {"images": [to_pil(image) for image in images]}
            shown |= dict(zip(("image",), shown["images"], strict=False))
            given |= {name: value for name, value in shown.items() if name in takes}
        return given if "seed" in given or "seed" not in takes else {**given, "seed": self.seed}


@dataclass(frozen=True)
class LostEnvironment:
    """Stands for an environment that did not come back in time: its late call may change it at any moment.

    It is false, and reading anything else of it raises ToolFault.
    """

    kind: str
    uid: str  # of the prompt

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which Python itself asks for, as in pickling
            raise AttributeError(name)
        raise ToolFault(
            f"the environment '{self.kind}' of prompt '{self.uid}' did not come back in time, so that nobody "
            f"knows its `{name}`; a reward finds this by `if not environment`"
        )


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and numpy inside the block; outside they stay as they were."""
    import numpy

    before = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])


def as_observation(result: Any, name: str, limits: Limits) -> Answer:
    """Convert what `reset` returned: as that of a tool, but None shows nothing."""
    return Answer() if result is None else Answer(as_parts(result, name, limits))


def as_reward(result: Any, name: str, limits: Limits) -> Answer:
    """Convert what `get_reward` returned: a number, or None where there is no reward."""
    match result:
        case None:
            return Answer()
        case Real() if math.isfinite(result):
            return Answer(value=float(result))
        case object(item=item):  # of a tensor or array
            return as_reward(item(), name, limits)
    raise ToolFault(f"returned {result!r:.80}; a reward is a finite number, or None")


def observed(prompt: Prompt, parts: Sequence[Part]) -> Prompt:
    """Append what an environment shows first to the last message of a prompt."""
    if not parts:
        return prompt
    *before, last = prompt.messages
    own = tuple(part for part in last.parts if part.text or part.media)  # without an empty text
    message = replace(last, parts=(*own, *parts))
    words = "".join(part.text for part in parts)
    columns = dict(prompt.columns)
    match columns.get("prompt"):  # what rewards in TRL's form read
        case str(asked):
            columns["prompt"] = asked + words
        case [*asked, {"content": str(content)} as turn]:
            columns["prompt"] = [*asked, {**turn, "content": content + words}]
        case [*asked, {"content": [*content]} as turn]:
            columns["prompt"] = [*asked, {**turn, "content": [*content, *map(_as_block, parts)]}]
    return replace(prompt, messages=(*before, message), columns=columns)


def _as_block(part: Part) -> dict[str, Any]:
    return {"type": "image"} if part.media else {"type": "text", "text": part.text}


class Shown:
    """Makes equal images one object, so that a group that sees the same is encoded once."""

    def __init__(self) -> None:
        self._known: dict[tuple, Part] = {}

    def once(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that were seen first of those that are equal."""
        return [self._known.setdefault(content_of(part), part) for part in parts]


def choose(kinds: Mapping[str, Environment], prompt: Prompt) -> tuple[Environment, dict[str, Any]]:
    """Choose the environment of a prompt, the only one or that which its column `environment` names.

    Returns the other columns too, which are for `reset`.
    """
    columns = dict(prompt.columns)
    if len(kinds) == 1:
        return next(iter(kinds.values())), columns
    name = columns.pop("environment", None)
    if name not in kinds:
        raise ValueError(
            f"prompt '{prompt.uid}' must name one of the environments {', '.join(kinds)} in its column "
            f"`environment`, not {name!r:.40}"
        )
    return kinds[name], columns


def named(factories: Sequence[Callable]) -> dict[str, Environment]:
    """Make the kinds of environments, by name. Raises ConfigError for two of one name."""
    kinds = [Environment.of(factory) for factory in factories]
    found = {kind.name: kind for kind in kinds}
    if not kinds or len(found) < len(kinds):
        raise ConfigError(
            f"`environment` must name environments of different names, not {[kind.name for kind in kinds]}; "
            "give each a `label`"
        )
    return found
