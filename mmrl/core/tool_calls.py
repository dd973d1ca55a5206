"""Tool calls in the text of a model, parsed in one place for engines and rewards; nothing is executed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENTS = ("arguments", "parameters", "args")  # names of the arguments of a call
# Before calls of Llama and Mistral. Both are special tokens, which decoded answers may leave out.
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
OBJECT = re.compile(r'[\s\[]*\{\s*"(?:type|name|function|arguments|parameters)"\s*:')  # one call, or a list
NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
BETWEEN = " \t\r\n;,[]"  # what stands between objects


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


def parse_llama_calls(text: str) -> list[Call | CallError]:
    """Find the calls of an answer in the form of Llama 3: `{"name": ..., "parameters": {...}}`.

    An answer has calls where it begins with one, or with <|python_tag|>; others may follow it.
    """
    inside = text.strip().removeprefix(PYTHON_TAG)
    return _objects(inside) if inside != text.strip() or OBJECT.match(inside) else []


def parse_mistral_calls(text: str) -> list[Call | CallError]:
    """Find the calls of an answer in the forms of Mistral: a list of objects, or the newer one by names.

    `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call. Where
    the marks are missing, the answer has to begin with a call.
    """
    begin, *marked = text.split(TOOL_CALLS)
    if not marked and (OBJECT.match(begin) or NAMED.match(begin)):
        marked = [begin]
    return [call for inside in marked for call in (_named if NAMED.match(inside) else _objects)(inside)]


def without_calls(text: str, tag: str = "tool_call") -> str:
    """Return the words of an answer outside of its calls, in any form, without space around them."""
    if _block(tag).search(text):
        return _block(tag).sub("", text).strip()
    outside = text.partition(TOOL_CALLS)[0].strip()
    begins = outside.startswith(PYTHON_TAG) or OBJECT.match(outside) or NAMED.match(outside)
    return "" if begins else outside


def _block(tag: str) -> re.Pattern:
    return re.compile(rf"<{tag}>(.*?)(?:</{tag}>|$)", re.DOTALL | re.IGNORECASE)


def _parse_call(inside: str) -> Call | CallError:
    try:
        return call_of(_loads(inside))
    except CallError as error:
        return error
    except (ValueError, RecursionError) as error:
        return _not_json(error)


def _not_json(error: Exception) -> CallError:
    return CallError(f"the call is not JSON ({type(error).__name__}: {error})")


def _objects(text: str) -> list[Call | CallError]:
    """Read the objects that a text begins with, one or more; other words after them are left out."""
    calls, text = [], text.lstrip(BETWEEN)
    while not calls or text.startswith("{"):
        try:
            written, end = DECODER.raw_decode(text)
            calls.append(call_of(written))
        except CallError as error:
            calls.append(error)
        except (ValueError, RecursionError) as error:
            return [*calls, _not_json(error)]
        text = text[end:].lstrip(BETWEEN)
    return calls


def _named(text: str) -> list[Call | CallError]:
    """Read the calls that a text begins with, each an object of arguments after a name."""
    calls = []
    while named := NAMED.match(text):
        try:
            arguments, end = DECODER.raw_decode(text, named.end())
        except (ValueError, RecursionError) as error:
            return [*calls, _not_json(error)]
        calls.append(Call(named[1], arguments))
        text = text[end:].lstrip(BETWEEN)
    return calls


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


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
