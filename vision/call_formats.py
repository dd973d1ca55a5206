"""How tools are described to a model, and in which form it has to write calls of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mmrl.config.schema import ConfigError
from mmrl.core.plain_text import inside
from mmrl.core.tool_calls import (
    Call,
    CallError,
    parse_calls,
    parse_glm_calls,
    parse_llama_calls,
    parse_mistral_calls,
    parse_qwen_xml_calls,
)
from mmrl.core.types import Message, Part, Prompt
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder, Tools

Parser = Callable[[str], Sequence[Call | CallError]]
FORMATS: tuple[Parser, ...] = (parse_calls, parse_llama_calls, parse_mistral_calls)
# Those whose arguments are text, of a type that the schema of the tool names.
TAGGED_FORMATS = (parse_qwen_xml_calls, parse_glm_calls)

# The words in which Qwen's chat templates tell a model about tools; those of Qwen2.5-VL leave them out.
QWEN_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def encode_with_tools(encoder: PromptEncoder, prompt: Prompt, tools: Tools) -> EncodedPrompt:
    """Encode a prompt with tools: in the words of the chat template, or in Qwen's where it has none."""
    if not tools or encoder.knows_tools(tools):
        return encoder.encode(prompt, tools)
    schemas = inside("tools", list(map(json.dumps, tools)))
    instructions = Part(QWEN_TOOLS.format(schemas="\n".join(schemas)))
    match prompt.messages:
        case [Message(role="system", parts=parts), *others]:
            told = "".join(part.text for part in parts) + "\n\n" + instructions.text
            system = Message("system", (Part(told),))
        case others:
            system = Message("system", (instructions,))
    return encoder.encode(replace(prompt, messages=(system, *others)))


def parser_of(encoder: PromptEncoder, tools: Tools, parse: Parser) -> Parser:
    """Return the parser of calls as the chat template writes them: one of this file, or an engine's own.

    It is `parse` where the template tells nothing of tools, since a model then reads Qwen's words. Raises
    ConfigError where no parser reads a call that the template has written, or where the template does not
    write the reply of a tool.
    """
    if not tools or not encoder.knows_tools(tools):
        return parse
    call = Call(tools[0]["function"]["name"], {"number": 1})
    try:
        written = encoder.written_call(call.name, call.arguments, tools)
        words = f"a call as {written[-200:]!r}"
    except ValueError as error:
        written, words = "", f"no call ({error})"
    forms = (*FORMATS, *(partial(reads, tools=tools) for reads in TAGGED_FORMATS))
    for reads in forms if parse in FORMATS else (parse,):  # an engine's own form is used or refused
        if reads(written) == [call]:
            _check_reply(encoder, tools)
            return reads
    raise ConfigError(
        f"the chat template of the model tells it about tools and writes {words}, but calls are read in the "
        'forms of Qwen, <tool_call>{"name": ..., "arguments": {...}}</tool_call> or '
        "<tool_call><function=name><parameter=key>value, of GLM, <tool_call>name<arg_key>key</arg_key>"
        '<arg_value>value, of Llama, {"name": ..., "parameters": {...}}, and of Mistral, '
        "[TOOL_CALLS] [{...}] or [TOOL_CALLS]name[ARGS]{...}, so that no call of the model would be made. "
        "Save the checkpoint with a template that writes them so, or with one that leaves tools out: the "
        "model then reads Qwen's words"
    )


def _check_reply(encoder: PromptEncoder, tools: Tools) -> None:
    """Raise ConfigError unless the chat template writes the reply of a tool after a call."""
    read, words = encoder.template.reads("tool", tools), ""
    if not read.forms:
        words = f"no message of the role `tool` ({read.why})"
    else:
        try:
            after_call, after_words = encoder.template.after_calls(tools)
            # A conversation goes on after the words of a call, which the template need not know as a call.
            words = (
                "" if after_call.endswith(after_words) else "other words than after an answer without calls"
            )
        except ValueError:
            words = "nothing after an answer without a list of calls"
    if not words:
        return
    raise ConfigError(
        f"the chat template of the model tells it about tools, but of a tool's reply it writes {words}. "
        "Save the checkpoint with a template that writes such replies, or with one that leaves tools "
        "out: the model then reads Qwen's words"
    )
