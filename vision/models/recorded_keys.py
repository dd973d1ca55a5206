"""Check that a chat template reads the extra keys of recorded turns: tool calls, thoughts, names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError

from mmrl.core.types import Message

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
OF_REPLIES = ("name", "tool_call_id")  # redundant: the order of replies tells which call they answer
Render = Callable[[list[dict[str, Any]]], str]


def check_keys(messages: Sequence[Message], render: Render, read: dict[str, bool]) -> None:
    """Raise ValueError for a key of a recorded turn that the chat template never reads.

    A template that reads a key may still omit it by its own rule, as the template of Qwen3 omits thoughts
    before the last question.

    Args:
        messages: The recorded turns.
        render: Renders a conversation with the template.
        read: Cache that maps role and key to whether the template reads the key.
    """
    for message in messages:
        for name, value in message.keys.items():
            redundant = message.role == "tool" and name in OF_REPLIES
            if redundant or _reads(message.role, name, value, render, read):
                continue
            others = [key for key in THOUGHTS if _reads(message.role, key, value, render, read)]
            advice = (
                f"rename it to `{others[0]}`, which it reads"
                if name in THOUGHTS and others
                else "leave it out"
            )
            raise ValueError(
                f"the chat template of the model does not read `{name}` of a message of the role "
                f"'{message.role}'; {advice}, or write it into the content"
            )


def _reads(role: str, name: str, value: Any, render: Render, read: dict[str, bool]) -> bool:
    place = json.dumps([role, name])
    if place not in read:
        turn = {"role": role, "content": [{"type": "text", "text": "x"}]}
        before = [] if role in ("system", "user") else [{**turn, "role": "user"}]
        after = [{**turn, "role": "user"}] if role == "system" else []
        try:
            plain, whole = (render([*before, one, *after]) for one in (turn, {**turn, name: value}))
            read[place] = plain != whole
        except (TemplateError, TypeError, ValueError):
            return True  # rendering the conversation itself raises a better error
    return read[place]
