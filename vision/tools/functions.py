"""Functions that a model may call in a conversation, and the binding of a call to their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from mmrl.config.binding import Bound
from mmrl.config.loading import ConfigError
from mmrl.config.schema import convert
from mmrl.core.tool_calls import Call, CallError
from mmrl.core.types import Media
from mmrl.vision.tools.declarations import SHOWN, argument_types, check_tool, parameters_of, schema_of
from mmrl.vision.tools.replies import Answer, Limits, as_answer

ShownImage = Annotated[Any, SHOWN]  # type of a tool's argument: a PIL image, which the model names by number
TIMEOUT = 60.0  # seconds that a tool may take
MAX_CALLS = 16  # calls of one turn


@dataclass(eq=False)
class Owner:
    """An object whose methods are called one after another; `lost` once a call has timed out."""

    lost: bool = False


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that a model may call, with its schema and its error handling.

    Args:
        name: Name that the model uses.
        function: Takes the arguments in the order of `signature`.
        signature: The arguments that the model gives.
        types: Type of each argument as the model writes it.
        images: Names of the arguments that are images, for which the model writes a number.
        schema: JSON schema, for the chat template.
        timeout: Seconds until a call counts as failed.
        retries: Further tries after an exception.
        on_error: `tell` the model in one line, `skip` the rest of the conversation, or `raise`.
        owner: Calls of tools with the same owner run in order, one after another.
        convert: Converts the function's result to an `Answer`.
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
    owner: Owner | None = None
    convert: Callable[[Any, str, Limits], Answer] = as_answer

    @staticmethod
    def of(function: Callable) -> Tool:
        """Make a tool from a function, or from a function with options that a configuration names."""
        target, name, call = function, getattr(function, "__name__", "tool"), {}
        if isinstance(function, Bound):
            target, name, call = function.entry.target, function.name, function.call
        check_tool(target, name)
        types, images = argument_types(target, name)
        # The model gives arguments by name, and the function gets them by position: some are positional-only.
        by_name = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters_of(target).values()]
        signature = inspect.signature(target).replace(parameters=by_name)
        return Tool(name, function, signature, types, images, schema_of(target, name, types), **call)

    def bind(self, given: Mapping[str, Any], images: Sequence[Media]) -> list[Any]:
        """List the arguments of a call in order, images undecoded. Raises CallError for wrong arguments."""
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
                numbers = f"0 to {len(images) - 1}" if images else "of which there is none"
                raise CallError(
                    f"{self.name}: `{name}` is the number of an image, {numbers}, not {number!r:.40}"
                )
            bound.arguments[name] = images[number]
        return list(bound.arguments.values())


def bind_call(
    call: Call | CallError, tools: Mapping[str, Tool], images: Sequence[Media]
) -> tuple[Tool, list[Any]] | CallError:
    """Look up the tool of a call and bind its arguments; a CallError for a call that cannot be made."""
    if isinstance(call, CallError):
        return call
    if call.name not in tools:
        return CallError(f"there is no tool {call.name!r:.40}; there are {', '.join(tools)}")
    try:
        return tools[call.name], tools[call.name].bind(call.arguments, images)
    except CallError as error:
        return error
