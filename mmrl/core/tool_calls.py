"""Tool calls in the text of a model, parsed in one place for engines and rewards; nothing is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    blocks = re.findall(rf"<{tag}>(.*?)(?:</{tag}>|$)", text, re.DOTALL | re.IGNORECASE)
    return [_parse_call(inside) for inside in blocks]


def _parse_call(inside: str) -> Call | CallError:
    try:
        written = json.loads(inside)
    except (ValueError, RecursionError) as error:
        return CallError(f"the call is not JSON ({type(error).__name__}: {error})")
    match written:
        case {"name": str(name), **others}:
            arguments = others.get("arguments", {})
            if isinstance(arguments, dict):
                return Call(name, arguments)
    return CallError('a call is written {"name": <tool>, "arguments": {<argument>: <value>}}')
