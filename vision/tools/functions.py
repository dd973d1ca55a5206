"""Functions that a model may call in a conversation, and the conversion of a call to their arguments."""

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

ShownImage = Annotated[Any, SHOWN]  # type of a PIL image, for which the model sends an index
TIMEOUT = 60.0  # default time limit of a tool call, in seconds
MAX_CALLS = 16  # maximum number of tool calls per turn


@dataclass(eq=False)
class Owner:
    """An object whose methods are called one at a time; `lost` becomes true when a call times out."""

    lost: bool = False


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that a model may call, with its schema and its error handling.

    Args:
        name: Name that the model uses.
        function: The function; it gets the arguments in the order of `signature`.
        signature: The arguments that the model provides.
        types: Type of each argument in the model's call.
        images: Names of the image arguments, for which the model sends an index.
        schema: JSON schema, for the chat template.
        timeout: Seconds after which a call counts as failed.
        retries: Number of further tries after an exception.
        on_error: What to do after an error. `tell`: show the model a line of text. `skip`: skip the rest of
            the conversation. `raise`: raise the error.
        owner: Calls of tools with the same owner run one after another.
        convert: Function that converts the result to an `Answer`.
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
        """Create a tool from a function, or from a function with options of a configuration (`Bound`)."""
        target, name, call = function, getattr(function, "__name__", "tool"), {}
        if isinstance(function, Bound):
            target, name, call = function.entry.target, function.name, function.call
        check_tool(target, name)
        types, images = argument_types(target, name)
        # Call by position, because the function may have positional-only arguments.
        by_name = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters_of(target).values()]
        signature = inspect.signature(target).replace(parameters=by_name)
        return Tool(name, function, signature, types, images, schema_of(target, name, types), **call)

    def bind(self, given: Mapping[str, Any], images: Sequence[Media]) -> list[Any]:
        """Return the arguments of a call in order, with undecoded images; raise CallError if one is wrong."""
        try:
            bound = self.signature.bind(**given)
            for name, value in bound.arguments.items():
                converted = convert(value, self.types[name], name)
                if isinstance(converted, Enum):  # pass other values as the model wrote them
                    bound.arguments[name] = converted
        except (TypeError, ConfigError) as error:
            raise CallError(f"{self.name}: {error}") from error
        bound.apply_defaults()
        for name in self.images:
            number = bound.arguments[name]
            if type(number) is not int:  # None, or the default if the model sent nothing
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
    """Find the tool of a call and bind its arguments; return a CallError if the call is invalid."""
    if isinstance(call, CallError):
        return call
    if call.name not in tools:
        return CallError(f"there is no tool {call.name!r:.40}; there are {', '.join(tools)}")
    try:
        return tools[call.name], tools[call.name].bind(call.arguments, images)
    except CallError as error:
        return error
