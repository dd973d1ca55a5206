"""Prompts, media, outcomes and trajectories: the data of a rollout before it enters a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.core.plain_text import whole
from mmrl.core.tool_calls import Call, CallError

if TYPE_CHECKING:  # commands that print texts start without torch
    from torch import Tensor

# Tag of rollouts that replay does not store, because neither token ids nor a transcript suffice to rebuild
# them.
CHANGED = "changed"
# Key of a tensor (T,) in a trajectory's `notes`: for each token, the training step of the weights that
# sampled it. Only trajectories that older weights sampled have it.
VERSION = "weights_version"


class Readable(Protocol):
    """Bytes that are read on demand, such as an image inside a row."""

    def read(self) -> bytes:
        """Read all bytes."""
        ...


class Unit(IntEnum):
    """The smallest part of a batch whose loss can be computed alone."""

    STEP = 0  # ascending by size, so that `max` combines two requirements
    ROW = 1
    GROUP = 2


@dataclass(frozen=True)
class Sound:
    """A decoded sound with one channel."""

    samples: Tensor  # (T,) float32 from -1 to 1; sample i is at i / `rate` seconds
    rate: int  # samples per second


@dataclass(frozen=True)
class Frames:
    """Decoded frames of a video, or an image as one frame at 0 seconds."""

    pixels: Tensor  # (F, 3, height, width) uint8
    times: Tensor  # (F,) seconds
    duration: float = 0.0  # seconds of the whole video
    sound: Sound | None = None  # sound track; sample 0 is at the time of the first frame


@dataclass(frozen=True)
class Media:
    """An image, a video, a sound or another kind of media, decoded when `load` is called.

    Args:
        kind: An entry of `mmrl.core.modalities.MODALITIES`.
        name: Name in errors and reports.
        load: Returns the decoded medium: `Frames` for images and videos, `Sound` for sounds.
        source: The encoded file or bytes. A resumed run compares their content.
    """

    kind: str
    name: str
    load: Callable[[], Any]
    source: Path | bytes | Readable | None = None


@dataclass(frozen=True)
class Part:
    """One part of a message: a text or a medium.

    `quoted` marks text of a model, a tool or an environment, in which a placeholder such as <image> is plain
    text. Other texts must not contain placeholders.
    """

    text: str = ""
    media: Media | None = None
    quoted: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", whole(self.text))

    @property
    def block(self) -> dict[str, Any]:
        """The part as a content block of chat templates, with a placeholder for a medium."""
        return {"type": self.media.kind} if self.media else {"type": "text", "text": self.text}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Args:
        role: "system", "user", "assistant" or "tool".
        parts: Texts and media, in order.
        extra: Other keys of a recorded turn that chat templates read, such as `tool_calls` and
            `reasoning_content`: a JSON object, as a text because messages are hashed.
        calls: Tool calls that the engine parsed from a turn of the policy; None if it parsed none.
    """

    role: str
    parts: tuple[Part, ...]
    extra: str = ""
    calls: tuple[Call | CallError, ...] | None = field(default=None, compare=False)

    @property
    def keys(self) -> dict[str, Any]:
        """The keys in `extra`, as a new dictionary."""
        return json.loads(self.extra) if self.extra else {}

    @property
    def text(self) -> str:
        """The texts of all parts, without media."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Outcome:
    """An answer that rewards score: a text, an image or a video.

    Args:
        text: The text.
        image: The image.
        video: The frames of the video.
        times: Seconds of the frames.
        end: Number of steps after which the outcome is complete; None: all steps of the rollout.
        tags: Labels that the engine or data set gives the outcome, such as `finish`.
        recorded: Rewards that the data set or the engine has measured.
        tokens: Token ids of `text`, if they are not the row's first `end` steps: a completed prefix.
        environment: The environment object of the conversation, for rewards written for TRL.
        extra: Tool calls and thoughts of a recorded answer, as in `Message`.
        asked: Prompt of this recorded answer, if its media differ from those of the data row; else empty.
        turns: Recorded messages between the prompt and this answer: of the assistant, of tools, of the user.
    """

    text: str | None = None
    image: Tensor | None = None  # (3, height, width) uint8
    video: Tensor | None = None  # (F, 3, height, width) uint8
    times: Tensor | None = None  # (F,)
    end: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, float] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None
    environment: Any = None
    extra: str = ""
    asked: tuple[Message, ...] = ()
    turns: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if self.text is not None:
            object.__setattr__(self, "text", whole(self.text))


@dataclass(frozen=True)
class Size:
    """The size of the image or video that a prompt asks for; 0 stands for the engine's own value.

    Args:
        num_frames: Frames of a video.
        height: In pixels.
        width: In pixels.
        source: Use the aspect ratio of the prompt's first image, with the engine's number of pixels.
    """

    num_frames: int = 0
    height: int = 0
    width: int = 0
    source: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt and its target.

    Args:
        uid: Unique name in the data set.
        messages: The conversation to answer.
        target: The reference that rewards compare answers with, such as a time span, a box or a caption.
        answers: Recorded answers: demonstrations or preference pairs.
        columns: Other columns of the row, which rewards written for TRL get by name.
        split: Split of the data set that has the row.
        tags: Labels that samplers give to every outcome of the prompt; advantages can use them as groups.
        size: Size of the image or video that the prompt asks for; None: the engine's size.
        tools: JSON schemas of the tools that the row names, which the model's template lists.
    """

    uid: str
    messages: tuple[Message, ...]
    target: Any = None
    answers: tuple[Outcome, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    split: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    size: Size | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The texts of all messages, without media."""
        return "\n".join(part.text for message in self.messages for part in message.parts if part.text)

    @property
    def media(self) -> tuple[Media, ...]:
        """The media of all messages, in order."""
        return tuple(
            part.media for message in self.messages for part in message.parts if part.media is not None
        )


@dataclass(frozen=True, eq=False)
class Transcript:
    """The token ids and replies of a conversation, from which its trajectory can be encoded again.

    Args:
        tools: JSON schemas of the tools in the prompt.
        turns: Token ids (t,) of every turn of the policy.
        replies: Messages after every turn but the last, as the policy read them.
        first: Index of the first turn that is in the row; earlier turns belong to other rows.
    """

    tools: tuple[Mapping[str, Any], ...]
    turns: tuple[Tensor, ...]
    replies: tuple[tuple[Message, ...], ...]
    first: int = 0


@dataclass(frozen=True)
class Trajectory:
    """One rollout, which is one row of the tables.

    Args:
        prompt: The answered prompt.
        group: Name of the group; advantages compare rows of the same group.
        outcomes: Outcomes of prefixes of the rollout, if any, then the final answer.
        steps: Data of the steps, which only the policy reads; it collates them into a batch.
        length: Number of steps.
        notes: Values (length,) that the engine recorded for every step, such as "logp" and "token".
        on_policy: Whether the policy sampled the steps.
        logged: Columns for the logged completions (TRL's `log_extra`).
        turns: Messages of a conversation after its prompt.
        shown: Images that tools returned, in order.
        transcript: The conversation, for replay; None for a single answer.
    """

    prompt: Prompt
    group: str
    outcomes: tuple[Outcome, ...]
    steps: Any
    length: int
    notes: Mapping[str, Tensor] = field(default_factory=dict)
    on_policy: bool = True
    logged: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[Message, ...] = ()
    shown: tuple[Media, ...] = ()
    transcript: Transcript | None = None


Rollouts = tuple[Trajectory, ...]


class PromptError(ValueError):
    """Raised if the policy cannot read the prompt `uid` or one of its recorded answers."""

    def __init__(self, uid: str, reason: str) -> None:
        super().__init__(uid, reason)
        self.uid, self.reason = uid, reason

    def __str__(self) -> str:
        named = f"'{self.uid}'" in self.reason
        return self.reason if named else f"cannot read the prompt '{self.uid}': {self.reason}"


@contextmanager
def reading(prompt: Prompt) -> Iterator[None]:
    """Convert a ValueError inside this context to a `PromptError`.

    Errors whose class sets `ends_run` concern the model, not the prompt, and pass unchanged.
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
    """Float type of metrics that are summed over processes; others are averaged."""


@dataclass(frozen=True)
class Clock:
    """Training progress, from which scheduled options are computed."""

    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    max_steps: int = 0  # steps of the whole run; 0 without a run, as when a configuration is checked


@dataclass(frozen=True)
class TrainerState:
    """Progress of training, with the names of transformers' TrainerState."""

    global_step: int = 0  # finished optimizer steps
    max_steps: int = 0  # all optimizer steps


class Steps(Protocol):
    """Model inputs with which a policy recomputes the steps of a batch, opaque to all other code.

    If some rows cannot be computed together, such as images of different sizes, the attribute `buckets` (N,)
    numbers the bucket of each row. A micro-batch holds rows of one bucket.
    """

    unit: Unit  # the smallest part that can be evaluated alone

    def cost(self, rows: Tensor) -> int:
        """Return the size in steps of a padded micro-batch of these rows, prompts included."""
        ...

    def __getitem__(self, part: tuple[Tensor, slice], /) -> Steps:
        """Select rows and a range of steps."""
        ...
