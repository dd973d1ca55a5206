"""Tools in the prompt: schemas for the chat template, or their description in Qwen's words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mmrl.core.plain_text import inside
from mmrl.core.types import Message, Part, Prompt
from mmrl.vision.models.chat_template import Tools

# The text with which Qwen's chat templates describe tools; Qwen2.5-VL's templates lack it.
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


def listed_tools(encoder: Any, prompt: Prompt, tools: Tools = ()) -> tuple[Prompt, Tools]:
    """Return a prompt, and the tools that the chat template must list in it.

    If the template supports no tools, the returned system prompt describes them in Qwen's words, recorded
    calls and replies have Qwen's form, and the returned tools are empty. `tools` are the engine's tools; by
    default, those of the prompt are used. Raises ValueError if both exist and differ.
    """
    if tools and prompt.tools and json.dumps(tools) != json.dumps(prompt.tools):
        raise ValueError(
            f"the row of '{prompt.uid}' lists `tools` of its own beside those of the engine; keep one of them"
        )
    tools = tools or prompt.tools
    if not tools or encoder.knows_tools(tools):
        return prompt, tools
    schemas = inside("tools", list(map(json.dumps, tools)))
    instructions = QWEN_TOOLS.format(schemas="\n".join(schemas))
    before, others = "", prompt.messages
    if others[0].role == "system":
        before, others = "".join(part.text for part in others[0].parts) + "\n\n", others[1:]
    system = Message("system", (Part(before + instructions),))
    messages = encoder.replies([system, *map(with_written_calls, others)], tools)
    return replace(prompt, messages=tuple(messages), tools=()), ()


def with_written_calls(turn: Message) -> Message:
    """Move the recorded tool calls of a turn into its text, in Qwen's form; other turns stay."""
    keys = turn.keys
    calls = [call["function"] for call in keys.pop("tool_calls", ())]
    if not calls:
        return turn
    words = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    text = "\n".join([*([turn.text] if turn.text else []), *words])
    return Message(turn.role, (Part(text),), json.dumps(keys, ensure_ascii=False) if keys else "")
