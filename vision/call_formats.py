"""How tools are described to a model, and in which form it has to write calls of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from jinja2 import TemplateError

from mmrl.config.schema import ConfigError
from mmrl.core.tool_calls import Call, CallError
from mmrl.core.types import Message, Part, Prompt
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder, Tools

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
    instructions = Part(QWEN_TOOLS.format(schemas="\n".join(map(json.dumps, tools))))
    match prompt.messages:
        case [Message(role="system", parts=parts), *others]:
            system = Message("system", (*parts, Part("\n\n"), instructions))
        case others:
            system = Message("system", (instructions,))
    return encoder.encode(replace(prompt, messages=(system, *others)))


def check_calls(
    encoder: PromptEncoder, tools: Tools, parse: Callable[[str], Sequence[Call | CallError]]
) -> None:
    """Raise ConfigError unless `parse` reads a call that the chat template has written.

    A template that tells nothing of tools is left out, since a model then reads Qwen's words.
    """
    if not tools or not encoder.knows_tools(tools):
        return
    call = Call(tools[0]["function"]["name"], {"number": 1})
    try:
        written = encoder.written_call(call.name, call.arguments, tools)
        read, words = parse(written), f"a call as {written[-200:]!r}"
    except (TemplateError, TypeError) as error:
        read, words = [], f"no call ({type(error).__name__}: {error})"
    if read != [call]:
        raise ConfigError(
            f"the chat template of the model tells it about tools and writes {words}, but "
            'calls are read as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, so that no call of '
            "the model would be made. Save the checkpoint with a template that writes them so, or with one "
            "that leaves tools out: the model then reads Qwen's words"
        )
