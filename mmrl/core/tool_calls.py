"""Parsers of tool calls in the text of a model, for engines and rewards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.core.plain_text import each_text, whole

ARGUMENTS = ("arguments", "parameters", "args")  # possible keys of the arguments of a call
# Markers before calls of Llama and Mistral (special tokens, which decoding may remove).
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
OBJECT = re.compile(r'[\s\[]*\{\s*"(?:type|name|function|arguments|parameters)"\s*:')  # one call, or a list
NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
# Patterns of calls with a tag per argument: Qwen3-Coder and Qwen3.5; GLM.
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|$)", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
GLM_CALL = re.compile(r"\s*([\w.-]+)\s*(.*)", re.DOTALL)
GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|$)", re.DOTALL)
BETWEEN = " \t\r\n;,[]"  # characters allowed between calls


class CallError(ValueError):
    """Raised for a malformed call; the message becomes the tool reply that the model reads."""


@dataclass(frozen=True)
class Call:
    """A tool call of a model: the name of a tool and the arguments."""

    name: str
    arguments: Mapping[str, Any]


def parse_calls(text: str, tag: str = "tool_call") -> list[Call | CallError]:
    """Parse the tool calls in an answer in Qwen's format.

    Format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A block with other content gives a
    CallError at its place in the list. The last block may lack its end tag. Tags are not case-sensitive.
    """
    return [_parse_call(inside) for inside in _block(tag).findall(text)]


def parse_llama_calls(text: str) -> list[Call | CallError]:
    """Parse the tool calls in an answer in Llama 3's format: `{"name": ..., "parameters": {...}}`.

    The answer must begin with a call or with <|python_tag|>; further calls may follow.
    """
    inside = text.strip().removeprefix(PYTHON_TAG)
    return _objects(inside) if inside != text.strip() or OBJECT.match(inside) else []


def parse_mistral_calls(text: str) -> list[Call | CallError]:
    """Parse the tool calls in an answer in one of Mistral's two formats.

    Formats: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each
    call. Without `[TOOL_CALLS]`, the answer must begin with a call.
    """
    begin, *marked = text.split(TOOL_CALLS)
    if not marked and (OBJECT.match(begin) or NAMED.match(begin)):
        marked = [begin]
    return [call for inside in marked for call in (_named if NAMED.match(inside) else _objects)(inside)]


def parse_qwen_xml_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[Call | CallError]:
    """Parse the tool calls in an answer in the format of Qwen3-Coder and Qwen3.5.

    Format: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`. Values are
    text; `typed` converts them by the schemas of `tools`.
    """
    return [
        _tagged(FUNCTION.fullmatch(inside), PARAMETER, "<function=name><parameter=key>value", tools)
        for inside in _block("tool_call").findall(text)
    ]


def parse_glm_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[Call | CallError]:
    """Parse the tool calls in an answer in the format of GLM-4.5 and later.

    Format: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`. Values are text;
    `typed` converts them by the schemas of `tools`.
    """
    form = "name<arg_key>key</arg_key><arg_value>value</arg_value>"
    return [
        _tagged(GLM_CALL.fullmatch(inside), GLM_ARGUMENT, form, tools)
        for inside in _block("tool_call").findall(text)
    ]


def _tagged(
    call: re.Match | None, argument: re.Pattern, form: str, tools: Sequence[Mapping[str, Any]]
) -> Call | CallError:
    """Parse a call with tags around its arguments."""
    at, arguments = 0, dict[str, str]()
    while call and (pair := argument.match(call[2], at)):
        arguments[pair[1].strip()], at = pair[2], pair.end()
    if call is None or call[2][at:].strip():
        return CallError(f"a call is written <tool_call>{form}, once for every argument")
    name = call[1].strip()
    try:
        return Call(name, {key: typed(value, key, name, tools) for key, value in arguments.items()})
    except CallError as error:
        return error


def typed(value: str, key: str, name: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Convert the text of an argument to its JSON type in the schema of the tool.

    One line break after the start tag and one before the end tag are dropped. A string stays as it is; other
    types are parsed as JSON, or as Python's True, False and None. Without a type in the schema, text that is
    not JSON stays a string. Raises CallError for text of another type.
    """
    value = value.removeprefix("\n").removesuffix("\n")
    functions = [tool.get("function", tool) for tool in tools]
    schemas = [tool.get("parameters", {}) for tool in functions if tool.get("name") == name]
    of_key = [schema["properties"][key] for schema in schemas if key in schema.get("properties", {})]
    types = _types(of_key[0]) if of_key else None
    if types == {"string"}:
        return value
    words = {"True": "true", "False": "false", "None": "null"}
    try:
        return _loads(words.get(value.strip(), value))
    except (ValueError, RecursionError) as error:
        if types is None or "string" in types:
            return value
        kinds = " or ".join(sorted(types))
        raise CallError(f"{name}: `{key}` is {kinds} in JSON, not {value[:40]!r}") from error


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; "string" for a schema without a type."""
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(named)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types(choice)
    return types or {"string"}


def without_calls(text: str, tag: str = "tool_call") -> str:
    """Remove tool calls, in any of the known formats, and surrounding whitespace from an answer."""
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
    """Parse the JSON objects at the start of a text, at least one; ignore the text after them."""
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
    """Parse the calls at the start of a text, each written as a name and a JSON object of arguments."""
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
    """Convert a JSON object with a `name` and arguments (an object, or JSON in a string) to a call.

    `ARGUMENTS` lists the keys of arguments. The call may be inside `function`, as in OpenAI's messages.
    Raises CallError for anything else.
    """
    match written:
        case {"function": Mapping() as inner}:
            return call_of(inner)
        case {"name": str(name), **rest}:
            given = [rest[key] for key in ARGUMENTS if key in rest]
            match [_parsed(value) if isinstance(value, str) else value for value in given]:
                case [] if not any(isinstance(value, Mapping) for value in rest.values()):
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
    """Parse JSON; unlike `json.loads`, raises ValueError for NaN and infinities."""
    return each_text(json.loads(text, parse_constant=_finite, parse_float=_finite), whole)


def _finite(written: str) -> float:
    if not math.isfinite(number := float(written)):
        raise ValueError(f"{written} is no finite number")
    return number


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
