"""Using a model: texts, images and videos in, texts or images out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from mmrl.config.plain import as_list
from mmrl.core.chat import blocks_of, to_pil
from mmrl.core.games import Game
from mmrl.core.protocols import Engine
from mmrl.core.types import Message, Outcome, Part, Prompt, Rollouts, Trajectory
from mmrl.data.fields import RowError, short
from mmrl.data.messages import ReadMedia, no_media, prompt_of


@runtime_checkable
class ReadsMedia(Protocol):
    """A policy whose prompts may have images and videos."""

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> ReadMedia:
        """Make the function that reads them.

        Args:
            options: Of a data set; those about videos, such as `max_frames`, apply.
            root: Folder that paths are relative to and may not leave; None for paths that the caller chose.
        """
        ...


@dataclass(frozen=True)
class Conversation:
    """What a model made of a question: all its turns, and what tools replied.

    Args:
        text: The last turn: the answer.
        messages: All turns after the question, as `apply_chat_template` of transformers takes them; images
            are those of PIL.
        images: Those that tools showed, in order.
        finish: Why it ended: `stop`, `length`, `turns`, `images`, `context` or `tool_error`.
        environment: The object that it was held with, if there was one.
        rewards: What the engine recorded: the `get_reward` of an environment, by its name.
    """

    text: str
    messages: list[dict[str, Any]]
    images: list[Any]
    finish: str
    environment: Any = None
    rewards: Mapping[str, float] = field(default_factory=dict)


class Session:
    """An engine with `answer` for what people ask; `rollout` answers prompts as the engine itself does.

    Args:
        engine: The engine that answers.
        data: Options of the data set that the model was made for; those about videos apply.
    """

    def __init__(self, engine: Engine, data: Mapping[str, Any] | None = None) -> None:
        self.engine, self.policy, self.notes = engine, engine.policy, engine.notes
        self.data, self._asked = data or {}, 0

    def media_reader(self, root: Path | None = None) -> ReadMedia:
        """Make the function that reads images and videos for the policy; see `ReadsMedia`."""
        reads = isinstance(self.policy, ReadsMedia)
        return self.policy.media_reader(self.data, root) if reads else no_media

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Make one rollout for every entry, in order."""
        return self.engine.rollout(prompts)

    def answer(self, prompt: Any, images: Any = None, videos: Any = None) -> Any:
        """Answer a question; of a list of questions, a list.

        A vision-language model gives a text; a flow model gives an image of PIL, or the frames of a video as
        a list of them. Random draws follow the seed and the number of questions asked before, so the same
        calls give the same answers.

        Args:
            prompt: A text, or messages as `apply_chat_template` of transformers takes them:
                `[{"role": "user", "content": ...}]`. Or a list of either, to answer several at once.
            images: Images of the question: paths, images of PIL or arrays (height, width, 3) uint8. Of a
                list of questions a list of such lists. They fill placeholders, or else come first.
            videos: Paths of videos, in the same way.

        Raises:
            RowError: For what is no image, video, text or message, and for files that are missing.
        """
        if _are_several(prompt):
            return [as_answer(row.outcomes[-1]) for row in self.ask(prompt, images, videos)]
        (row,) = self.ask([prompt], [images], [videos])
        return as_answer(row.outcomes[-1])

    def converse(
        self, prompt: Any, images: Any = None, videos: Any = None, columns: Mapping[str, Any] | None = None
    ) -> Conversation:
        """Answer a question like `answer`, and return the whole conversation with the tools of the engine.

        Args:
            prompt: A text, or messages.
            images: Images of the question.
            videos: Videos of the question.
            columns: Columns of a row that the question would have, which an environment begins with.

        Raises:
            RowError: As `answer`; also where the model makes images, with which nobody converses.
        """
        (row,) = self.ask([prompt], [images], [videos], columns or {})
        return as_conversation(row)

    def ask(
        self,
        prompts: Sequence[Any],
        images: Any = None,
        videos: Any = None,
        columns: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rollouts:
        """Make a rollout of every question; `images` and `videos` have those of each of them, in order."""
        asked, read = [], self.media_reader()
        media = _per_prompt(images, len(prompts), "images"), _per_prompt(videos, len(prompts), "videos")
        for question, shown, filmed in zip(prompts, *media, strict=True):
            given = {"image": as_list(shown), "video": as_list(filmed)}  # a single one may stand by itself
            prompt = prompt_of(f"p{self._asked + len(asked)}", question, given, read=read)
            asked.append(replace(prompt, columns=columns))
        self._asked += len(asked)
        return self.one_each(asked)

    def one_each(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Make rollouts and return one for every entry, in order, without those added for training.

        Raises RowError for an engine that plays games, whose turns are several answers; none is played.
        """
        if game := _game_of(self.engine):
            raise RowError(
                f"the engine plays the game {type(game).__name__}, which has no single answer; name the "
                "folder of the model (checkpoint-*/model) to ask it, or use `rollout`"
            )
        waiting: dict[str, list[Trajectory]] = defaultdict(list)
        for row in self.rollout(prompts):
            waiting[row.prompt.uid].append(row)
        # Engines that add rows, such as drafts or a greedy answer, put them after the answers to a prompt.
        return tuple(waiting[prompt.uid].pop(0) for prompt in prompts)


def _game_of(engine: Any) -> Game | None:
    """Return the rules that an engine, or one that it wraps, plays by."""
    while engine is not None:
        if isinstance(game := getattr(engine, "game", None), Game):
            return game
        engine = getattr(engine, "engine", None)
    return None


def as_conversation(row: Trajectory) -> Conversation:
    """Read the conversation of a rollout; raises RowError where it is no text."""
    last = row.outcomes[-1]
    if last.text is None:
        raise RowError("this model makes images, so it holds no conversation; ask it by `answer`")
    messages = row.turns or (Message("assistant", (Part(last.text),)),)
    # Of a tool as blocks, of a model as a text.
    written = [
        {
            "role": message.role,
            "content": blocks_of(message)
            if message.role == "tool"
            else "".join(part.text for part in message.parts),
        }
        for message in messages
    ]
    blocks = [block for message in written if message["role"] == "tool" for block in message["content"]]
    images = [block["image"] for block in blocks if block["type"] == "image"]
    return Conversation(
        last.text, written, images, last.tags.get("finish", ""), last.environment, dict(last.recorded)
    )


def as_answer(outcome: Outcome) -> Any:
    """Return the text of an outcome, its image for PIL, or the frames of its video as a list of these."""
    if outcome.text is not None:
        return outcome.text
    images = images_of(outcome)
    return images if outcome.video is not None else images[0]


def images_of(outcome: Outcome) -> list[Any]:
    """Return the image of an outcome for PIL, or the frames of its video; none where it is a text."""
    if outcome.image is not None:
        return [to_pil(outcome.image)]
    return [] if outcome.video is None else [to_pil(frame) for frame in outcome.video]


def _are_several(prompt: Any) -> bool:
    """Whether a prompt is a list of prompts: of texts, or of conversations."""
    match prompt:
        case str() | [Mapping(), *_]:
            return False
        case [*items] if items and all(isinstance(item, str | list | tuple) for item in items):
            return True
    raise RowError(
        f"wanted a text, messages ({{'role': ..., 'content': ...}}), or a list of these, got {short(prompt)}"
    )


def _per_prompt(value: Any, size: int, name: str) -> Sequence[Any]:
    """Return the media of every prompt."""
    match value:
        case None:
            return [None] * size
        case list() | tuple() if len(value) == size:
            return value
        case list() | tuple():
            got = str(len(value))
        case _:
            got = type(value).__name__
    raise RowError(f"wanted a list with the {name} of each of {size} prompts, got {got}")
