"""Tokens of recorded answers, rendered with a chat template, and a check of extra keys of turns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.vision.models.listed_tools import listed_tools

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
OF_REPLIES = ("name", "tool_call_id")  # ignored: the order of replies tells which call they answer
OPEN = re.compile(r"[<\[](\w+)[>\]]\s*$")  # opening tag of a thought at the end of a prompt
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
            return True  # rendering it later raises a better error
    return read[place]


def recorded_answer(
    encoder: Any, prompt: Prompt, outcome: Outcome, read: dict[str, bool]
) -> tuple[str, Tensor]:
    """Return the text and the tokens (T,) of a recorded answer, including the end token.

    The chat template renders the answer, with its tool calls and thoughts, as the next turn of the prompt, as
    `processor.apply_chat_template` does. An answer is not changed if it continues a thought whose opening tag
    is already in the prompt.

    Args:
        encoder: The `PromptEncoder` of the model.
        prompt: The prompt.
        outcome: The answer.
        read: Cache of `check_keys`.

    Raises:
        ValueError: The template omits calls or thoughts, or does not continue the prompt.
    """
    text = encoder.without_end(outcome.text or "")
    encoder.check_answer(text + outcome.extra)
    if not text and not outcome.extra:
        return text, encoder.answer(text)
    prompt, tools = listed_tools(encoder, prompt)
    messages = (*prompt.messages, Message("assistant", (Part(text),), outcome.extra))
    check_keys(messages, lambda turns: encoder._render(turns, tools, answers=False), read)
    before = encoder.rendered(prompt.messages, tools, answers=True)
    whole = encoder.rendered(messages, tools, answers=False)
    if not whole.startswith(before):
        thought = OPEN.search(before)
        if not outcome.extra and thought and f"/{thought[1]}" in text:
            return text, encoder.answer(text)
        raise ValueError(
            f"the chat template of the model begins an answer with {before[-20:]!r}, and writes this one "
            "otherwise; write the thought into the row (as `reasoning_content`, or in the words of the "
            "model), or set `policy.chat_template_kwargs` so that none begins"
        )
    ids = encoder.plain.tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
    ends = [place for place, token in enumerate(ids) if token in encoder.end]
    last = ends[-1 if outcome.extra else 0] + 1 if ends else len(ids)  # calls may contain end tokens
    tokens = torch.tensor(ids[:last] if ends else [*ids, encoder.end[0]])
    shown = encoder.text(tokens)
    return text if shown.strip() == text.strip() else shown, tokens
