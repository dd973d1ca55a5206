"""A conversation of a policy with tools, as it grows: its turns, the replies, and why it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from mmrl.core.tool_calls import Call, CallError
from mmrl.core.types import Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder, Tools
from mmrl.vision.tool_calls import Tool
from mmrl.vision.tool_replies import Answer, content_of

Replies = list[tuple[Tool | None, Answer]]  # to the calls of a turn, with the tools that were found
CALL = "call"  # tag `finish` of a turn after which the conversation goes on
# Engines that part conversations.
INSTEAD = (
    "it takes the place of `vision.with_tools`, with the same `tool`; the state of an environment cannot be "
    "copied, so that conversations with environments cannot part"
)


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
    reads: list[EncodedPrompt] = field(default_factory=list)  # before each turn, as it is read now
    replies: list[Sequence[Message]] = field(default_factory=list)  # to each turn, as tools gave them
    begins: list[int] = field(default_factory=lambda: [0])  # turns from which on another prompt was read
    first: int = 0  # the number of the first turn, of a part
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
        self.reads.append(self.read)
        self.notes.append(answer.notes)
        self.outcomes.append(answer.outcomes[-1])
        text = answer.outcomes[-1].text or ""
        self.messages.append(Message("assistant", (Part(text),), calls=tuple(calls)))
        self.temperature = answer.steps.temperature

    def extended(self, encoder: PromptEncoder, observed: Sequence[Message], most: int) -> list[EncodedPrompt]:
        """Append replies, with the last `most` images and videos: what stands before each turn and the next.

        What comes before the first reply that changes is not encoded again. Raises ValueError for an unfit
        image.
        """
        before, now = recent_media(self.replies, most), recent_media([*self.replies, observed], most)
        same = next((i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), -1)
        same = len(before) if same < 0 else same
        reads = self.reads[: same + 1]
        for (_, ids), reply in zip(self.turns[same:], now[same:], strict=True):
            written = encoder.replies(reply, self.schemas)
            reads.append(encoder.extend(reads[-1], ids, *written, tools=self.schemas))
        return reads

    def go_on(self, reads: Sequence[EncodedPrompt], observed: Sequence[Message]) -> None:
        """Take replies in, with what `extended` made of them."""
        if reads[-2] is not self.reads[-1]:
            self.begins.append(len(self.turns))
        *self.reads, self.read = reads
        media = [part.media for reply in observed for part in reply.parts if part.media]
        self.images = [*self.images, *(medium for medium in media if medium.kind == "image")]
        self.replies.append(observed)
        self.messages += observed
        self.shown += len(media)

    def rows(self, most: int) -> list[Self]:
        """Cut it where what was read was rewritten, into parts that are a row each; else itself.

        A part has the messages up to its end, and those images of tools that it reads.
        """
        if len(self.begins) == 1:
            return [self]
        parts, ends = [], [i for i, message in enumerate(self.messages, 1) if message.role == "assistant"]
        for begin, end in pairwise([*self.begins, len(self.turns)]):
            seen = recent_media(self.replies[: end - 1], most)
            media = [part.media for replies in seen for reply in replies for part in reply.parts]
            parts.append(
                replace(
                    self,
                    turns=self.turns[begin:end],
                    notes=self.notes[begin:end],
                    outcomes=self.outcomes[begin:end],
                    messages=self.messages[: ends[end - 1]],
                    images=images_of(self.prompt) + [x for x in media if x and x.kind == "image"],
                    first=begin,
                    finish=self.finish if end == len(self.turns) else CALL,
                )
            )
        return parts

    def states(self) -> list[str]:
        """Name the state that each turn started from: the prompt, and the replies that were read last.

        Turns to the same prompt have the same state where they answer the same replies, whatever came before
        (the anchor observation of GiGPO); before any reply the prompt alone is the state.
        """
        begun = _content_hash(self.reads[0])
        found, replies = [], list[Message]()
        for message in self.messages:
            if message.role != "assistant":
                replies.append(message)
                continue
            seen = [[content_of(part) for part in reply.parts] for reply in replies]
            found.append(hashlib.blake2b(repr((begun, seen)).encode(), digest_size=16).hexdigest())
            replies = []
        return found[self.first :]


def recent_media(replies: Sequence[Sequence[Message]], most: int) -> list[Sequence[Message]]:
    """Replace all but the last `most` images and videos in replies by a text; 0: none."""
    number = sum(part.media is not None for turn in replies for reply in turn for part in reply.parts)
    if not most or number <= most:
        return list(replies)
    left = number - most  # to be replaced, from the oldest on

    def kept(part: Part) -> Part:
        nonlocal left
        if part.media is None or not left:
            return part
        left -= 1
        return Part(f"[{part.media.kind} omitted]")

    return [[replace(reply, parts=tuple(map(kept, reply.parts))) for reply in turn] for turn in replies]


def images_of(prompt: Prompt) -> list[Media]:
    """List the images of a prompt, which tools know by their numbers."""
    return [media for media in prompt.media if media.kind == "image"]


def _content_hash(read: EncodedPrompt) -> str:
    """Hash the tokens and media of a prompt."""
    digest = hashlib.blake2b(read.ids.numpy().tobytes(), digest_size=16)
    for name, tensor in sorted(read.media.items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def copied(talk: Conversation, index: int) -> Conversation:
    """Copy a conversation between two turns, so that it can go on under another number."""
    values = {field.name: getattr(talk, field.name) for field in fields(talk)}
    lists = {name: list(value) for name, value in values.items() if isinstance(value, list)}
    return replace(talk, index=index, **lists)
