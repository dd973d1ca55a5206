"""The state of a conversation with tools: next prompt, turns, replies, and the reason why it ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from mmrl.core.tool_calls import Call, CallError
from mmrl.core.types import Media, Message, Outcome, Part, Prompt, Trajectory, Transcript
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder, Tools
from mmrl.vision.tools.functions import Tool
from mmrl.vision.tools.pool import Replies
from mmrl.vision.tools.replies import content_of

CALL = "call"  # tag `finish` of a turn after which the conversation continues
# End of the error message of engines that branch conversations, for an engine with environments.
INSTEAD = (
    "it takes the place of `vision.with_tools`, with the same `tool`; the state of an environment cannot be "
    "copied, so that conversations with environments cannot part"
)


@dataclass(eq=False)
class Conversation:
    """A running conversation: the encoded prompt of the next turn, and all turns so far."""

    prompt: Prompt
    index: int  # index of this answer among all answers to the prompt
    read: EncodedPrompt  # encoded prompt of the next turn
    images: list[Media]  # images that tools may refer to, by index
    tools: Mapping[str, Tool]
    turns: list[tuple[EncodedPrompt, Tensor]] = field(default_factory=list)  # (prompt when sampled, ids (t,))
    notes: list[Mapping[str, Tensor]] = field(default_factory=list)  # token values by name, (t,) per turn
    outcomes: list[Outcome] = field(default_factory=list)  # outcome of every turn
    messages: list[Message] = field(default_factory=list)  # turns of the model and replies to them
    temperature: float = 1.0
    shown: int = 0  # number of images and videos from tools
    finish: str = ""  # reason why the conversation ended
    reads: list[EncodedPrompt] = field(default_factory=list)  # turn prompts without older images
    replies: list[Sequence[Message]] = field(default_factory=list)  # replies to every turn, with all media
    begins: list[int] = field(default_factory=lambda: [0])  # indices of turns with a rewritten prompt
    recorded: list[dict[str, float]] = field(default_factory=list)  # values to record with each turn, by name
    first: int = 0  # index of the first turn; above 0 in later training rows of a conversation
    past: list[Tensor] = field(default_factory=list)  # ids (t,) of the turns before turn `first`
    collect: Callable[[], Replies] | None = None  # waits for the replies to pending calls

    @property
    def schemas(self) -> Tools:
        """Return the JSON schemas of the tools, for the chat template."""
        return tuple(tool.schema for tool in self.tools.values())

    @property
    def length(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(len(ids) for _, ids in self.turns)

    def add(self, answer: Trajectory, calls: Sequence[Call | CallError]) -> None:
        """Append a turn of the policy with its tool calls."""
        self.turns.append((self.read, answer.steps.ids))
        self.reads.append(self.read)
        self.notes.append(answer.notes)
        self.outcomes.append(answer.outcomes[-1])
        text = answer.outcomes[-1].text or ""
        self.messages.append(Message("assistant", (Part(text),), calls=tuple(calls)))
        self.recorded.append({})
        self.temperature = answer.steps.temperature

    def extended(self, encoder: PromptEncoder, observed: Sequence[Message], most: int) -> list[EncodedPrompt]:
        """Encode the prompts of all turns, and of the next turn after the replies `observed`.

        Prompts show the last `most` images and videos of tools (0: all). Prompts before the first changed
        reply are reused. Raises ValueError for an image that the model cannot read.
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
        """Append the replies `observed`, and store the encoded prompts `reads` from `extended`."""
        if reads[-2] is not self.reads[-1]:
            self.begins.append(len(self.turns))
        *self.reads, self.read = reads
        media = [part.media for reply in observed for part in reply.parts if part.media]
        self.images = [*self.images, *(medium for medium in media if medium.kind == "image")]
        self.replies.append(observed)
        self.messages += observed
        self.shown += len(media)

    @property
    def transcript(self) -> Transcript:
        """Return the token ids of all turns, and the replies before the last turn as the policy read them."""
        turns = (*self.past, *(ids for _, ids in self.turns))
        return Transcript(self.schemas, turns, tuple(map(tuple, self.replies[: len(turns) - 1])), self.first)

    def rows(self, most: int) -> list[Self]:
        """Split the conversation at turns with a rewritten prompt; every part becomes a training row.

        A part contains the messages up to its last turn, and the images from tools that its prompt shows.
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
                    recorded=self.recorded[begin:end],
                    messages=self.messages[: ends[end - 1]],
                    images=images_of(self.prompt) + [x for x in media if x and x.kind == "image"],
                    replies=seen,
                    past=[ids for _, ids in self.turns[:begin]],
                    first=begin,
                    finish=self.finish if end == len(self.turns) else CALL,
                )
            )
        return parts

    def states(self) -> list[str]:
        """Return an id of the state before each turn: a hash of the prompt and of the latest replies.

        Turns for the same prompt and the same latest replies have the same state, whatever came before (the
        anchor observation of GiGPO). Before any reply, the state depends on the prompt alone.
        """
        digest = hashlib.blake2b(self.reads[0].ids.numpy().tobytes(), digest_size=16)
        for name, tensor in sorted(self.reads[0].media.items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        start, names, replies = digest.hexdigest(), [], list[Message]()
        for message in self.messages:
            if message.role != "assistant":
                replies.append(message)
                continue
            seen = [[content_of(part) for part in reply.parts] for reply in replies]
            names.append(hashlib.blake2b(repr((start, seen)).encode(), digest_size=16).hexdigest())
            replies = []
        return names[self.first :]

    def actions(self) -> list[dict[str, str]]:
        """Return the tags `action` and `tool` of every turn.

        `action` holds the tool calls with their arguments as canonical JSON, and `tool` the names of the
        tools. A turn without calls has its text, in lower case with single spaces, and `answer`.
        """
        written = [message for message in self.messages if message.role == "assistant"][self.first :]
        return [action_tags(message) for message in written]


def action_tags(turn: Message) -> dict[str, str]:
    """Return the tags `action` and `tool` of a turn; see `Conversation.actions`."""
    if not turn.calls:
        return {"action": " ".join(turn.parts[0].text.lower().split()), "tool": "answer"}
    calls = [
        ("malformed", str(call)) if isinstance(call, CallError) else (call.name, call.arguments)
        for call in turn.calls
    ]
    action = json.dumps(calls, sort_keys=True, default=str)
    return {"action": action, "tool": " ".join(name for name, _ in calls)}


def recent_media(replies: Sequence[Sequence[Message]], most: int) -> list[Sequence[Message]]:
    """Replace all but the last `most` images and videos in replies by a short text; 0 replaces none."""
    number = sum(part.media is not None for turn in replies for reply in turn for part in reply.parts)
    if not most or number <= most:
        return list(replies)
    left = number - most  # number of media to replace, the oldest first

    def omit(part: Part) -> Part:
        nonlocal left
        if part.media is None or not left:
            return part
        left -= 1
        return Part(f"[{part.media.kind} omitted]")

    return [[replace(reply, parts=tuple(map(omit, reply.parts))) for reply in turn] for turn in replies]


def images_of(prompt: Prompt) -> list[Media]:
    """List the images of a prompt; tools refer to them by index."""
    return [media for media in prompt.media if media.kind == "image"]


def copied(talk: Conversation, index: int) -> Conversation:
    """Copy a conversation between two turns, under another answer index; both can continue."""
    values = {field.name: getattr(talk, field.name) for field in fields(talk)}
    lists = {name: list(value) for name, value in values.items() if isinstance(value, list)}
    return replace(talk, index=index, **lists)
