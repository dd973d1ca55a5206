"""Sessions with a model: texts, images and videos in, texts or images out."""

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
    """Interface of a policy whose prompts may have images and videos."""

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> ReadMedia:
        """Return the function that reads images and videos for prompts.

        Args:
            options: Options of a data set; only those about videos, such as `max_frames`, are used.
            root: Folder to which paths are relative and in which they must stay; None allows any path.
        """
        ...


@dataclass(frozen=True)
class Conversation:
    """The turns of a model after a question, and the replies of tools.

    Args:
        text: The answer, which is the last turn.
        messages: All turns after the question, as for transformers' `apply_chat_template`, with PIL images.
        images: Images from tools, in order.
        finish: Reason of the end: `stop`, `length`, `turns`, `images`, `context` or `tool_error`.
        environment: The environment of the conversation, if any.
        rewards: Maps names to recorded rewards, such as `get_reward` of the environment.
    """

    text: str
    messages: list[dict[str, Any]]
    images: list[Any]
    finish: str
    environment: Any = None
    rewards: Mapping[str, float] = field(default_factory=dict)


class Session:
    """A loaded engine that answers questions of users with `answer`, and prompts with `rollout`.

    Args:
        engine: The engine.
        data: Data set options in the model's configuration; only those about videos are used.
    """

    def __init__(self, engine: Engine, data: Mapping[str, Any] | None = None) -> None:
        self.engine, self.policy, self.notes = engine, engine.policy, engine.notes
        self.data, self._asked = data or {}, 0

    def media_reader(self, root: Path | None = None) -> ReadMedia:
        """Return the function that reads images and videos for the policy; see `ReadsMedia`."""
        reads = isinstance(self.policy, ReadsMedia)
        return self.policy.media_reader(self.data, root) if reads else no_media

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Return one rollout per prompt, in order."""
        return self.engine.rollout(prompts)

    def answer(self, prompt: Any, images: Any = None, videos: Any = None) -> Any:
        """Answer a question; for a list of questions, return a list of answers.

        A vision-language model returns a text. A flow model returns a PIL image, or the frames of a video as
        a list of PIL images. Random numbers depend on the seed and the number of earlier questions, so the
        same sequence of calls returns the same answers.

        Args:
            prompt: A text, or messages in the format of transformers' `apply_chat_template`: `[{"role":
                "user", "content": ...}]`. A list of texts or of messages is answered as a batch.
            images: Images of the question: paths, PIL images or arrays (height, width, 3) uint8. For a list
                of questions, a list of such lists. Images fill placeholders, or else precede the text.
            videos: Paths of videos, in the same way.

        Raises: RowError: If an argument has another type, or a file is missing or broken.
        """
        if _are_several(prompt):
            return [as_answer(row.outcomes[-1]) for row in self.ask(prompt, images, videos)]
        (row,) = self.ask([prompt], [images], [videos])
        return as_answer(row.outcomes[-1])

    def converse(
        self, prompt: Any, images: Any = None, videos: Any = None, columns: Mapping[str, Any] | None = None
    ) -> Conversation:
        """Answer a question as `answer` does, and return the whole conversation with the engine's tools.

        Args:
            prompt: A text, or messages.
            images: Images of the question.
            videos: Videos of the question.
            columns: Columns of a data row, with which an environment is reset.

        Raises:
            RowError: As in `answer`, and for models that generate images.
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
        """Return one rollout per question; `images` and `videos` have an entry per question."""
        questions, read = [], self.media_reader()
        media = _per_prompt(images, len(prompts), "images"), _per_prompt(videos, len(prompts), "videos")
        for question, shown, filmed in zip(prompts, *media, strict=True):
            given = {"image": as_list(shown), "video": as_list(filmed)}  # a single medium needs no list
            prompt = prompt_of(f"p{self._asked + len(questions)}", question, given, read=read)
            questions.append(replace(prompt, columns=columns))
        self._asked += len(questions)
        return self.one_each(questions)

    def one_each(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Return one rollout per prompt, in order, without the rows that engines add for training.

        Raises RowError for an engine that plays games, because a game has no single answer.
        """
        if game := _game_of(self.engine):
            raise RowError(
                f"the engine plays the game {type(game).__name__}, which has no single answer; name the "
                "folder of the model (checkpoint-*/model) to ask it, or use `rollout`"
            )
        waiting: dict[str, list[Trajectory]] = defaultdict(list)
        for row in self.rollout(prompts):
            waiting[row.prompt.uid].append(row)
        # Engines put additional rows, such as drafts or a greedy answer, after the answers of a prompt.
        return tuple(waiting[prompt.uid].pop(0) for prompt in prompts)


def _game_of(engine: Any) -> Game | None:
    """Return the game of an engine or of an engine that it wraps; None without a game."""
    while engine is not None:
        if isinstance(game := getattr(engine, "game", None), Game):
            return game
        engine = getattr(engine, "engine", None)
    return None


def as_conversation(row: Trajectory) -> Conversation:
    """Convert a rollout to a conversation; raise RowError if its answer is not text."""
    last = row.outcomes[-1]
    if last.text is None:
        raise RowError("this model makes images, so it holds no conversation; ask it by `answer`")
    messages = row.turns or (Message("assistant", (Part(last.text),)),)
    # Replies of tools become content blocks, turns of the model become text.
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
    """Return an outcome's text, its image as a PIL image, or the frames of its video as PIL images."""
    if outcome.text is not None:
        return outcome.text
    images = images_of(outcome)
    return images if outcome.video is not None else images[0]


def images_of(outcome: Outcome) -> list[Any]:
    """Return an outcome's image, or the frames of its video, as PIL images; an empty list for text."""
    if outcome.image is not None:
        return [to_pil(outcome.image)]
    return [] if outcome.video is None else [to_pil(frame) for frame in outcome.video]


def _are_several(prompt: Any) -> bool:
    """Whether a prompt is a list of texts or of conversations; raise RowError for an invalid prompt."""
    match prompt:
        case str() | [Mapping(), *_]:
            return False
        case [*items] if items and all(isinstance(item, str | list | tuple) for item in items):
            return True
    raise RowError(
        f"wanted a text, messages ({{'role': ..., 'content': ...}}), or a list of these, got {short(prompt)}"
    )


def _per_prompt(value: Any, size: int, name: str) -> Sequence[Any]:
    """Return a list with the media of each prompt; raise RowError unless there is one entry per prompt."""
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
