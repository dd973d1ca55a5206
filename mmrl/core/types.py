"""What travels through the loops before it is numbers: prompts, outcomes and trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


class Unit(IntEnum):
    """The smallest cut that keeps a loss exact: steps are independent, or those of a row, or the rows of a
    group."""

    STEP = 0
    ROW = 1
    GROUP = 2


@dataclass(frozen=True)
class Frames:
    """Decoded pictures. An image is one frame at 0 seconds.

    `pixels` is (F, 3, height, width) uint8, `times` is (F,) seconds, `duration` is the length of the whole
    clip in seconds.
    """

    pixels: Tensor
    times: Tensor
    duration: float = 0.0


@dataclass(frozen=True)
class Media:
    """A picture or clip that is decoded when somebody looks at it. `name` appears in errors and reports.

    `source` is the file or the bytes that it is decoded from, so that a run that goes on notices another one.
    """

    kind: str  # "image" or "video"
    name: str
    load: Callable[[], Frames]
    source: Path | bytes | None = None


@dataclass(frozen=True)
class Part:
    """A piece of a message: a text, or a medium."""

    text: str = ""
    media: Media | None = None


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `role` is "system", "user" or "assistant"."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Outcome:
    """What a reward looks at.

    `image` is (3, height, width) uint8, `video` is (frames, 3, height, width) uint8 and `times` its (frames,)
    seconds. `end` is how many steps the outcome has seen; None is the whole rollout. `tags` say what it is,
    `recorded` holds rewards measured earlier, or by the engine that knows the rules.
    """

    text: str | None = None
    image: Tensor | None = None
    video: Tensor | None = None
    times: Tensor | None = None
    end: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """What is asked, and what its rewards compare with.

    `target` is whatever the rewards of its task read: a span in seconds, a box, a caption. `answers` are
    recorded answers: demonstrations or preference pairs. `columns` is the rest of its row, handed by name to
    rewards written for TRL.
    """

    uid: str
    messages: tuple[Message, ...]
    target: Any = None
    answers: tuple[Outcome, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Join what is asked in words, without media."""
        return "\n".join(part.text for message in self.messages for part in message.parts if part.text)

    @property
    def media(self) -> tuple[Media, ...]:
        """List the media in order of appearance."""
        return tuple(
            part.media for message in self.messages for part in message.parts if part.media is not None
        )


@dataclass(frozen=True)
class Trajectory:
    """One rollout: one row of the tables.

    Rows with one `group` are compared. The last outcome is the answer, earlier ones are probes of a prefix.
    Only the policy that collates `steps` looks inside. `notes` are (length,) numbers taken down on the way
    ("logp", "entropy", "token").
    """

    prompt: Prompt
    group: str
    outcomes: tuple[Outcome, ...]
    steps: Any
    length: int
    notes: Mapping[str, Tensor] = field(default_factory=dict)
    on_policy: bool = True


Rollouts = tuple[Trajectory, ...]


@dataclass(frozen=True)
class Clock:
    """What a schedule sees: the step, and the metrics of the last report."""

    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Steps(Protocol):
    """What a policy needs to see its steps again. Opaque to everything but that policy."""

    unit: Unit  # the smallest cut it allows

    def cost(self, rows: Tensor) -> int:
        """Count the steps held at once when these rows are computed together, prompts included."""

    def __getitem__(self, cut: tuple[Tensor, slice]) -> Steps:
        """Cut out rows and a range of steps."""
