"""A conversation of a policy with tools, as it grows: its turns, the replies, and why it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.core.tool_calls import Call, CallError
from mmrl.core.types import Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.vision.models.processor import EncodedPrompt, Tools
from mmrl.vision.tool_calls import Tool
from mmrl.vision.tool_replies import Answer, content_of

Replies = list[tuple[Tool | None, Answer]]  # to the calls of a turn, with the tools that were found


@dataclass(eq=False)
class Conversation:
    """A conversation that grows: what the policy reads next, and its turns so far."""

    prompt: Prompt
    index: int  # of this answer to the prompt
    read: EncodedPrompt
    images: list[Media]
    tools: Mapping[str, Tool]
    turns: list[tuple[EncodedPrompt, Tensor]] = field(default_factory=list)
    notes: list[Mapping[str, Tensor]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)  # of the turns
    messages: list[Message] = field(default_factory=list)  # turns and replies
    temperature: float = 1.0
    shown: int = 0  # images and videos that tools showed
    finish: str = ""  # why it ended
    collect: Callable[[], Replies] | None = None  # gets the replies to the calls that were begun

    @property
    def schemas(self) -> Tools:
        """What the chat template tells the model about tools."""
        return tuple(tool.schema for tool in self.tools.values())

    @property
    def length(self) -> int:
        """Tokens that the policy chose."""
        return sum(len(ids) for _, ids in self.turns)

    def add(self, answer: Trajectory, calls: Sequence[Call | CallError]) -> None:
        """Append a turn of the policy, and the calls in it."""
        self.turns.append((self.read, answer.steps.ids))
        self.notes.append(answer.notes)
        self.outcomes.append(answer.outcomes[-1])
        text = answer.outcomes[-1].text or ""
        self.messages.append(Message("assistant", (Part(text),), tuple(calls)))
        self.temperature = answer.steps.temperature

    def states(self) -> list[str]:
        """Name the state that each turn started from: the prompt, and the replies that were read last.

        Turns to the same prompt have the same state where they answer the same replies, whatever came before
        (the anchor observation of GiGPO); before any reply the prompt alone is the state.
        """
        begun = _content_hash(self.turns[0][0])
        found, replies = [], list[Message]()
        for message in self.messages:
            if message.role != "assistant":
                replies.append(message)
                continue
            seen = [[content_of(part) for part in reply.parts] for reply in replies]
            found.append(hashlib.blake2b(repr((begun, seen)).encode(), digest_size=16).hexdigest())
            replies = []
        return found


def images_of(prompt: Prompt) -> list[Media]:
    """List the images of a prompt, which tools know by their numbers."""
    return [media for media in prompt.media if media.kind == "image"]


def _content_hash(read: EncodedPrompt) -> str:
    """Hash the tokens and media of a prompt."""
    digest = hashlib.blake2b(read.ids.numpy().tobytes(), digest_size=16)
    for name, tensor in sorted(read.media.items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
