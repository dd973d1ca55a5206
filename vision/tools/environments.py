"""Environments of conversations with TRL's interface: creation, `reset`, tool calls and `get_reward`."""

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
from mmrl.vision.tools.declarations import check_environment, tool_names
from mmrl.vision.tools.functions import TIMEOUT, Owner, Tool
from mmrl.vision.tools.replies import Answer, Limits, ToolFault, as_parts, to_pil


@dataclass(frozen=True, eq=False)
class Environment:
    """A kind of environment: its constructor, tools and error handling.

    Args:
        name: Name in rewards and rows: the label if there is one, otherwise the class name.
        make: Function that creates an environment.
        takes: The parameters of `reset`.
        tools: The tools, bound to a probe object.
        scores: Whether the environment has `get_reward`.
        scores_turns: Whether the environment has `get_turn_reward`.
        timeout: Time limit for each method call, in seconds.
        retries: Number of further tries of `reset` after an exception, each with a new environment.
        on_error: What to do after an error, as in `Tool`.
    """

    name: str
    make: Callable[[], Any]
    takes: Mapping[str, inspect.Parameter]
    tools: tuple[Tool, ...]
    scores: bool
    scores_turns: bool
    timeout: float = TIMEOUT
    retries: int = 0
    on_error: str = "tell"

    @staticmethod
    def of(factory: Callable[[], Any]) -> Environment:
        """Create a kind of environment from a class or function, or from one with options (`Bound`)."""
        name, call = getattr(factory, "__name__", type(factory).__name__), {}
        if isinstance(factory, Bound):
            name, call = factory.name, dict(factory.call)
        probe = factory()
        check_environment(type(probe), name)
        tools = [Tool.of(getattr(probe, method)) for method in tool_names(type(probe))]
        own = {key: value for key, value in call.items() if key != "retries"}  # tool calls are not retried
        return Environment(
            name,
            factory,
            inspect.signature(probe.reset).parameters,
            tuple(replace(tool, **own) for tool in tools),
            *(callable(getattr(probe, method, None)) for method in ("get_reward", "get_turn_reward")),
            **call,
        )


@dataclass(eq=False)
class Episode(Owner):
    """The environment of one conversation.

    Args:
        kind: The kind of environment.
        seed: Seed of `reset`.
        environment: The environment object; the call that `begin` prepares creates it.
    """

    kind: Environment = field(kw_only=True)
    seed: int = field(kw_only=True)
    environment: Any = None

    def tools(self) -> dict[str, Tool]:
        """Return the methods that the model may call, as tools keyed by name."""
        own = ((tool, getattr(self.environment, tool.name)) for tool in self.kind.tools)
        return {tool.name: replace(tool, function=method, owner=self) for tool, method in own}

    def begin(self, columns: Mapping[str, Any], images: Sequence[Media], others: Owner) -> Tool:
        """Prepare the call that creates and resets the environment.

        If `reset` has no parameter `seed`, the global random generators of Python and numpy are seeded. Such
        calls run one after another, because they share the owner `others`.
        """
        given = self._reset_arguments(columns, images)

        def reset() -> Any:
            self.environment = self.kind.make()
            return self.environment.reset(**given)

        def seeded() -> Any:
            with global_seed(self.seed):  # an async `reset` must end before the generators are restored
                shown = reset()
                return asyncio.run(awaited(shown)) if inspect.isawaitable(shown) else shown

        async def awaited(shown: Awaitable[Any]) -> Any:
            return await asyncio.wait_for(shown, self.kind.timeout)

        takes_seed = "seed" in given
        call = self._call("reset", reset if takes_seed else seeded, as_observation)
        return replace(call, retries=self.kind.retries, owner=None if takes_seed else others)

    def ask(self, method: str = "get_reward") -> Tool:
        """Prepare the call of the environment's `get_reward` or `get_turn_reward`."""
        return self._call(method, getattr(self.environment, method), as_reward)

    def _call(self, name: str, function: Callable, convert: Callable[..., Answer]) -> Tool:
        """Prepare the call of a method without arguments; `convert` converts its result to an `Answer`."""
        limits: dict[str, Any] = {"timeout": self.kind.timeout, "on_error": self.kind.on_error}
        return Tool(name, function, inspect.Signature(), {}, frozenset(), {}, **limits, convert=convert)

    def _reset_arguments(self, columns: Mapping[str, Any], images: Sequence[Media]) -> dict[str, Any]:
        """Collect the arguments of `reset`: copies of the row's columns and images, and `seed`."""
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
    """Placeholder for an environment in an unknown state, because one of its calls timed out.

    The placeholder is false, and reading any attribute raises ToolFault.
    """

    kind: str
    uid: str  # uid of the prompt

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself reads these, for example in pickling
            raise AttributeError(name)
        raise ToolFault(
            f"the environment '{self.kind}' of prompt '{self.uid}' did not come back in time, so that nobody "
            f"knows its `{name}`; a reward finds this by `if not environment`"
        )


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and numpy inside the block; restore their state afterwards."""
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
    """Convert the result of `reset` to an answer, as for a tool; convert None to an empty answer."""
    return Answer() if result is None else Answer(as_parts(result, name, limits))


def as_reward(result: Any, name: str, limits: Limits) -> Answer:
    """Convert the result of a reward method to an answer: a finite number, or None for no reward."""
    match result:
        case None:
            return Answer()
        case Real() if math.isfinite(result):
            return Answer(value=float(result))
        case object(item=item):  # a tensor or array
            return as_reward(item(), name, limits)
    raise ToolFault(f"returned {result!r:.80}; a reward is a finite number, or None")


def observed(prompt: Prompt, parts: Sequence[Part]) -> Prompt:
    """Append the observation that `reset` returned to the last message of a prompt."""
    if not parts:
        return prompt
    *before, last = prompt.messages
    own = tuple(part for part in last.parts if part.text or part.media)  # drop empty texts
    message = replace(last, parts=(*own, *parts))
    words = "".join(part.text for part in parts)
    columns = dict(prompt.columns)
    match columns.get("prompt"):  # reward functions of TRL read this column
        case str(text):
            columns["prompt"] = text + words
        case [*turns, {"content": str(content)} as turn]:
            columns["prompt"] = [*turns, {**turn, "content": content + words}]
        case [*turns, {"content": [*content]} as turn]:
            columns["prompt"] = [*turns, {**turn, "content": [*content, *(part.block for part in parts)]}]
    return replace(prompt, messages=(*before, message), columns=columns)


def choose(kinds: Mapping[str, Environment], prompt: Prompt) -> tuple[Environment, dict[str, Any]]:
    """Choose the environment that the column `environment` of a prompt names, unless there is only one.

    Returns the environment, and the other columns as the arguments of `reset`.
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
    """Create the kinds of environments, keyed by name; raise ConfigError for duplicate names."""
    kinds = [Environment.of(factory) for factory in factories]
    by_name = {kind.name: kind for kind in kinds}
    if not kinds or len(by_name) < len(kinds):
        raise ConfigError(
            f"`environment` must name environments of different names, not {[kind.name for kind in kinds]}; "
            "give each a `label`"
        )
    return by_name
