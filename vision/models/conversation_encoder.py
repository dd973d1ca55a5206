"""Encoder of whole conversations, prompt and answer, as reward models read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.vision.models.chat_template import Tools
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder


class ConversationEncoder(PromptEncoder):
    """Encodes a prompt and its answer with the chat template, without a generation prompt at the end.

    The tokens are those of `processor.apply_chat_template(messages)` in transformers, which TRL's
    `RewardTrainer` reads too.
    """

    answers = False

    def conversation(self, prompt: Prompt, outcome: Outcome) -> EncodedPrompt:
        """Encode a prompt and its answer; raises `PromptError` if the model cannot read them."""
        return self.encode(replace(prompt, messages=answered(prompt, outcome)))

    def _render(self, messages: list[dict[str, Any]], tools: Tools = (), answers: bool = False) -> str:
        return super()._render(messages, tools, answers)


def answered(prompt: Prompt, outcome: Outcome) -> tuple[Message, ...]:
    """Append an answer to the messages of a prompt.

    A text becomes a turn of the assistant, after the other recorded turns of the answer. An image or a video
    is appended to the last turn of the user, because chat templates read media there.
    """
    messages = (*(outcome.asked or prompt.messages), *outcome.turns)
    shown = media_of_outcome(prompt, outcome)
    if shown is None:
        text = Part(outcome.text or "", quoted=True)
        return (*messages, Message("assistant", (text,), outcome.extra))
    *before, last = messages
    return (*before, Message(last.role, (*last.parts, Part(media=shown)), last.extra))


def media_of_outcome(prompt: Prompt, outcome: Outcome) -> Media | None:
    """Return the image or video of an outcome as a medium; None for a text."""
    if outcome.image is not None:
        still = Frames(outcome.image[None].cpu(), torch.zeros(1))
        return Media("image", f"image of an answer to '{prompt.uid}'", lambda: still)
    if outcome.video is not None:
        times = torch.arange(len(outcome.video)).float() if outcome.times is None else outcome.times
        frames = Frames(outcome.video.cpu(), times.cpu(), float(times[-1]))
        return Media("video", f"video of an answer to '{prompt.uid}'", lambda: frames)
    return None
