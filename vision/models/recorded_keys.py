"""Whether a chat template reads what recorded turns hold beside their contents: calls, thoughts, names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError

from mmrl.core.types import Message

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
OF_REPLIES = ("name", "tool_call_id")  # they say which call a reply answers, as its place does
Render = Callable[[list[dict[str, Any]]], str]


def check_keys(messages: Sequence[Message], render: Render, known: dict[str, bool]) -> None:
    """Raise ValueError for a key of a recorded turn that the chat template does not read in any place.

    `render` writes a conversation in the words of the template, and `known` keeps what was found. A template
    that reads a key may still leave it out by its own rule, as Qwen3's does with thoughts before the last
    question.
    """
    for message in messages:
        for name, value in message.keys.items():
            if (
                message.role == "tool"
                and name in OF_REPLIES
                or _reads(message.role, name, value, render, known)
            ):
                continue
            others = [key for key in THOUGHTS if _reads(message.role, key, value, render, known)]
            advice = (
                f"rename it to `{others[0]}`, which it reads"
                if name in THOUGHTS and others
                else "leave it out"
            )
            raise ValueError(
                f"the chat template of the model does not read `{name}` of a message of the role "
                f"'{message.role}'; {advice}, or write it into the content"
            )


def _reads(role: str, name: str, value: Any, render: Render, known: dict[str, bool]) -> bool:
    place = json.dumps([role, name])
    if place not in known:
        turn = {"role": role, "content": [{"type": "text", "text": "x"}]}
        before = [] if role in ("system", "user") else [{**turn, "role": "user"}]
        after = [{**turn, "role": "user"}] if role == "system" else []
        try:
            plain, whole = (render([*before, one, *after]) for one in (turn, {**turn, name: value}))
            known[place] = plain != whole
        except (TemplateError, TypeError, ValueError):
            return True  # the conversation itself is written next, and says what is wrong with it
    return known[place]
