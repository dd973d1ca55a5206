"""Tools of a conversation: functions that a model may call, and how a call becomes their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from mmrl.config.binding import RIGHTS, Bound
from mmrl.config.loading import ConfigError
from mmrl.config.schema import convert
from mmrl.core.tool_calls import CallError
from mmrl.core.types import Media
from mmrl.vision.tool_functions import SHOWN, argument_types, check_tool, parameters_of, schema_of
from mmrl.vision.tool_replies import Answer, Limits, as_answer
from mmrl.vision.tool_rights import Rights

ShownImage = Annotated[Any, SHOWN]  # argument of a tool: a PIL image, which the model names by its number
TIMEOUT = 60.0  # seconds that a tool may take
MAX_CALLS = 16  # calls of one turn


@dataclass(eq=False)
class Owner:
    """Something whose tools are called one after another; `lost` once a call has not come back in time."""

    lost: bool = False


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that a model may call, and how its faults are met.

    Args:
        name: What the model calls it.
        function: Takes the arguments in the order of `signature`.
        signature: The arguments that the model gives.
        types: What the model gives for each of them.
        images: Which of them are images, of which the model gives the numbers.
        schema: What the chat template tells the model.
        timeout: Seconds until an answer counts as missing.
        retries: Further tries after an exception.
        on_error: `tell` the model in one line, `skip` the rest of the conversation, or `raise`.
        rights: What it may do besides computing; None: everything that the process may.
        owner: Calls of tools with the same owner are made in order, one after another.
        convert: Makes the answer from what the function returned.
    """

    name: str
    function: Callable
    signature: inspect.Signature
    types: Mapping[str, Any]
    images: frozenset[str]
    schema: Mapping[str, Any]
    timeout: float = TIMEOUT
    retries: int = 0
    on_error: str = "tell"
    rights: Rights | None = None
    owner: Owner | None = None
    convert: Callable[[Any, str, Limits], Answer] = as_answer

    @staticmethod
    def of(function: Callable) -> Tool:
        """Make a tool of a function, or of one that a configuration named with its options."""
        target, name, call = function, getattr(function, "__name__", "tool"), {}
        match function:
            case Bound(entry=entry, options=options, call=given):
                target, name = entry.target, function.name
                call = {key: value for key, value in given.items() if key not in RIGHTS}
                shipped = target.__module__.startswith("mmrl.")
                call["rights"] = Rights.declared(given, options, shipped=shipped)
        check_tool(target, name)
        types, images = argument_types(target, name)
        # Arguments are given by name, and handed on in their order, so that they may be positional-only.
        by_name = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters_of(target).values()]
        signature = inspect.signature(target).replace(parameters=by_name)
        return Tool(name, function, signature, types, images, schema_of(target, name, types), **call)

    def bind(self, given: Mapping[str, Any], images: Sequence[Media]) -> list[Any]:
        """Put a call's arguments in order; images stay undecoded. Raises CallError for what does not fit."""
        try:
            bound = self.signature.bind(**given)
            for name, value in bound.arguments.items():
                converted = convert(value, self.types[name], name)
                if isinstance(converted, Enum):  # other values stay as the model wrote them
                    bound.arguments[name] = converted
        except (TypeError, ConfigError) as error:
            raise CallError(f"{self.name}: {error}") from error
        bound.apply_defaults()
        for name in self.images:
            number = bound.arguments[name]
            if type(number) is not int:  # None, or a default that is an image itself
                continue
            if not 0 <= number < len(images):
                known = f"0 to {len(images) - 1}" if images else "of which there is none"
                raise CallError(
                    f"{self.name}: `{name}` is the number of an image, {known}, not {number!r:.40}"
                )
            bound.arguments[name] = images[number]
        return list(bound.arguments.values())
