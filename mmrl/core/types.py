"""Prompts, media, outcomes and trajectories: the data of a rollout before it is a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mmrl.core.plain_text import whole
from mmrl.core.tool_calls import Call, CallError

CHANGED = "changed"  # tag of rows that no prompt of the data and tokens make again: they are not remembered


class Readable(Protocol):
    """Bytes that are read when they are asked for, such as those of an image inside a row."""

    def read(self) -> bytes:
        """Return all of them."""
        ...


class Unit(IntEnum):
    """The smallest part of a batch whose loss can be computed by itself: a step, a row or a group."""

    STEP = 0  # in order, so that `max` is the unit that suits two pieces
    ROW = 1
    GROUP = 2


@dataclass(frozen=True)
class Frames:
    """Decoded frames of a video, or an image as one frame at 0 seconds.

    `pixels` is (F, 3, height, width) uint8, `times` is (F,) seconds, `duration` is the length of the whole
    video in seconds.
    """

    pixels: Tensor
    times: Tensor
    duration: float = 0.0


@dataclass(frozen=True)
class Media:
    """An image or video, decoded when `load` is called. `name` appears in errors and reports.

    `source` is the file or the bytes that it is decoded from; a resumed run compares its content.
    """

    kind: str  # "image" or "video"
    name: str
    load: Callable[[], Frames]
    source: Path | bytes | Readable | None = None


@dataclass(frozen=True)
class Part:
    """A part of a message: a text, an image or a video.

    `said` is a text of a model, a tool or an environment, in which a placeholder of media is no mistake.
    """

    text: str = ""
    media: Media | None = None
    said: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", whole(self.text))


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `role` is "system", "user", "assistant" or "tool".

    `calls` are the tool calls of a turn of the policy, as its engine read them; None where none did. `extra`
    is what chat templates read of a recorded turn beside its content: a JSON object of keys such as
    `tool_calls`, `reasoning_content` and `name`, as a text because messages are hashed.
    """

    role: str
    parts: tuple[Part, ...]
    extra: str = ""
    calls: tuple[Call | CallError, ...] | None = field(default=None, compare=False)

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a recorded turn that `extra` holds, new in every call."""
        return json.loads(self.extra) if self.extra else {}

    @property
    def text(self) -> str:
        """The texts of all parts, without media."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Outcome:
    """What a policy made of a prompt, which rewards score: a text, an image or a video.

    `image` is (3, height, width) uint8, `video` is (frames, 3, height, width) uint8 and `times` its (frames,)
    seconds. `end` is the number of steps that made the outcome; None is the whole rollout. `tags` describe
    it, and `recorded` has rewards that were measured before, or by the engine. `tokens` are those of a text
    that is not made of the steps alone, such as a prefix that was completed for a reward. `environment` is
    the object that a conversation was held with, which rewards written for TRL read. `extra` holds the calls
    and thoughts beside the text of a recorded answer, as that of a `Message`.
    """

    text: str | None = None
    image: Tensor | None = None
    video: Tensor | None = None
    times: Tensor | None = None
    end: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, float] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None
    environment: Any = None
    extra: str = ""

    def __post_init__(self) -> None:
        if self.text is not None:
            object.__setattr__(self, "text", whole(self.text))


@dataclass(frozen=True)
class Prompt:
    """A prompt with its target, which rewards compare answers with.

    `target` is what the rewards of its task read: a span in seconds, a box, a caption. `answers` are recorded
    answers: demonstrations or preference pairs. `columns` has the other columns of its row, which rewards
    written for TRL get by name. `split` is the part of the data set that the row comes from. `tags` are those
    that all outcomes of the prompt get, so that the chain can compare by them: set by samplers.
    """

    uid: str
    messages: tuple[Message, ...]
    target: Any = None
    answers: tuple[Outcome, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    split: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The texts of all messages, without media."""
        return "\n".join(part.text for message in self.messages for part in message.parts if part.text)

    @property
    def media(self) -> tuple[Media, ...]:
        """The images and videos of all messages, in order."""
        return tuple(
            part.media for message in self.messages for part in message.parts if part.media is not None
        )


@dataclass(frozen=True)
class Trajectory:
    """One rollout, which is one row of the tables.

    Rows of the same `group` are compared. The last outcome is the answer, earlier ones belong to prefixes of
    it. Only the policy that collates `steps` reads them. `notes` are (length,) numbers that the engine noted
    of every step ("logp", "entropy", "token"). `turns` are the messages of a conversation after its prompt.
    """

    prompt: Prompt
    group: str
    outcomes: tuple[Outcome, ...]
    steps: Any
    length: int
    notes: Mapping[str, Tensor] = field(default_factory=dict)
    on_policy: bool = True  # False: not sampled from the policy
    logged: Mapping[str, Any] = field(default_factory=dict)  # columns of completions (TRL's `log_extra`)
    turns: tuple[Message, ...] = ()
    shown: tuple[Media, ...] = ()  # images that tools showed, in the order of the conversation


Rollouts = tuple[Trajectory, ...]


class PromptError(ValueError):
    """A prompt, or one of its recorded answers, that the policy cannot read; `uid` names the prompt."""

    def __init__(self, uid: str, reason: str) -> None:
        super().__init__(uid, reason)
        self.uid, self.reason = uid, reason

    def __str__(self) -> str:
        named = f"'{self.uid}'" in self.reason
        return self.reason if named else f"cannot read the prompt '{self.uid}': {self.reason}"


@contextmanager
def reading(prompt: Prompt) -> Iterator[None]:
    """Turn a ValueError inside this context into a `PromptError` of a prompt.

    One whose class says `ends_run`, as it is about the model and not about the prompt, stays what it is.
    """
    try:
        yield
    except PromptError:
        raise
    except ValueError as error:
        if getattr(error, "ends_run", False):
            raise
        raise PromptError(prompt.uid, str(error)) from error


class Count(float):
    """A metric of one process that is added up over all processes, where other metrics are averaged."""


@dataclass(frozen=True)
class Clock:
    """What a schedule depends on: the step, the metrics of the last one, and the steps of the whole run."""

    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    max_steps: int = 0  # 0 where no run is known, as when a configuration is checked


@dataclass(frozen=True)
class TrainerState:
    """How far training has come, in the names of transformers' TrainerState: optimizer steps."""

    global_step: int = 0  # finished ones
    max_steps: int = 0


class Steps(Protocol):
    """What a policy needs to evaluate steps again; only that policy reads it."""

    unit: Unit  # the smallest cut it allows

    def cost(self, rows: Tensor) -> int:
        """Count the steps in memory when these rows are computed together, prompts included."""
        ...

    def __getitem__(self, cut: tuple[Tensor, slice]) -> Steps:
        """Cut out rows and a range of steps."""
        ...
