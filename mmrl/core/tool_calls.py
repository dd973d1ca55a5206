"""Tool calls in the text of a model, parsed in one place for engines and rewards; nothing is executed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENTS = ("arguments", "parameters", "args")  # names of the arguments of a call


class CallError(ValueError):
    """A call that cannot be made as the model wrote it; the message is for the model to read."""


@dataclass(frozen=True)
class Call:
    """A call that a model wrote: the name of a tool and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def parse_calls(text: str, tag: str = "tool_call") -> list[Call | CallError]:
    """Find the calls of an answer, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen's form).

    What stands there but is no such JSON becomes an error in its place. The last block may lack its end. The
    case of the tag does not matter.
    """
    return [_parse_call(inside) for inside in _block(tag).findall(text)]


def without_calls(text: str, tag: str = "tool_call") -> str:
    """Return the words of an answer outside of its calls, without space around them."""
    return _block(tag).sub("", text).strip()


def _block(tag: str) -> re.Pattern:
    return re.compile(rf"<{tag}>(.*?)(?:</{tag}>|$)", re.DOTALL | re.IGNORECASE)


def _parse_call(inside: str) -> Call | CallError:
    try:
        return call_of(_loads(inside))
    except CallError as error:
        return error
    except (ValueError, RecursionError) as error:
        return CallError(f"the call is not JSON ({type(error).__name__}: {error})")


def call_of(written: Any) -> Call:
    """Read a call from JSON: a `name`, and an object of arguments, which may be JSON in a text.

    Its arguments are called as in `ARGUMENTS`; the call may stand in a `function`, as in OpenAI's messages.
    Raises CallError for anything else.
    """
    match written:
        case {"function": Mapping() as inner}:
            return call_of(inner)
        case {"name": str(name), **rest}:
            given = [rest[key] for key in ARGUMENTS if key in rest]
            match [_parsed(value) if isinstance(value, str) else value for value in given]:
                case []:
                    return Call(name, {})
                case [Mapping() as arguments]:
                    return Call(name, arguments)
    raise CallError('a call is written {"name": <tool>, "arguments": {<argument>: <value>}}')


def _parsed(text: str) -> Any:
    """Parse JSON; None for anything else."""
    try:
        return _loads(text)
    except (ValueError, RecursionError):
        return None


def _loads(text: str) -> Any:
    """Parse JSON; raises ValueError also for NaN and infinities, which Python reads and JSON has not."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(written: str) -> float:
    if not math.isfinite(number := float(written)):
        raise ValueError(f"{written} is no finite number")
    return number
