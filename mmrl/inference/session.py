"""Sessions that answer questions with a loaded model: text, images and videos in, text or images out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    """Interface of a policy that reads images and videos in prompts."""

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> ReadMedia:
        """Return the function that reads images and videos for prompts.

        Args:
            options: Options of a data set, of which only video options such as `max_frames` are used.
            root: Folder that contains all media files, to which paths are relative; None allows any path.
        """
        ...


@dataclass(frozen=True)
class Conversation:
    """Result of `Session.converse`: the turns of the model after a question, with tool replies.

    Args:
        text: The answer, which is the last turn.
        messages: All turns after the question, in the format of `apply_chat_template`, with PIL images.
        images: Images from tools, in order.
        finish: Why the conversation ended: `stop`, `length`, `turns`, `images`, `context` or `tool_error`.
        environment: The environment of the conversation, if any.
        rewards: Maps names to recorded rewards, such as the result of the environment's `get_reward`.
    """

    text: str
    messages: list[dict[str, Any]]
    images: list[Any]
    finish: str
    environment: Any = None
    rewards: Mapping[str, float] = field(default_factory=dict)


class Session:
    """A loaded engine with methods that answer a user's questions (`answer`) or prompts (`rollout`).

    Args:
        engine: The engine.
        data: Options of the data set in the model's configuration, of which only video options are used.
    """

    def __init__(self, engine: Engine, data: Mapping[str, Any] | None = None) -> None:
        self.engine, self.policy, self.notes = engine, engine.policy, engine.notes
        self.data, self._asked = data or {}, 0

    def media_reader(self, root: Path | None = None) -> ReadMedia:
        """Return the policy's function that reads images and videos for prompts; see `ReadsMedia`."""
        reads = isinstance(self.policy, ReadsMedia)
        return self.policy.media_reader(self.data, root) if reads else no_media

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Return one rollout per prompt, in order."""
        return self.engine.rollout(prompts)

    def check(self, prompt: Prompt) -> None:
        """Raise `PromptError` if a prompt requests an image or video size that the engine cannot generate."""
        for engine in _engines_in(self.engine):
            if (result_size := getattr(engine, "result_size", None)) is not None:
                result_size(prompt)

    def answer(self, prompt: Any, images: Any = None, videos: Any = None) -> Any:
        """Answer a question; for a list of questions, return a list of answers.

        A vision-language model returns a text. A flow model returns a PIL image, or the frames of a video as
        a list of PIL images. Random numbers depend on the seed and the number of earlier questions, so
        the same sequence of calls returns the same answers.

        Args:
            prompt: A text, or messages in the format of transformers' `apply_chat_template`: `[{"role":
                "user", "content": ...}]`. A list of texts or of messages is answered as a batch.
            images: Images of the question: paths, PIL images or arrays (height, width, 3) uint8. For a list
                of questions, one such list per question. Images replace placeholders or precede the text.
            videos: Paths of videos, in the same form as images.

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
            columns: Columns of a data row, passed to the `reset` of an environment.

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
        """Return one rollout per question; `images` and `videos` have one entry per question."""
        questions, read = [], self.media_reader()
        media = _per_prompt(images, len(prompts), "images"), _per_prompt(videos, len(prompts), "videos")
        for question, shown, filmed in zip(prompts, *media, strict=True):
            given = {"image": as_list(shown), "video": as_list(filmed)}  # accepts a single medium
            prompt = prompt_of(f"p{self._asked + len(questions)}", question, given, read=read)
            questions.append(replace(prompt, columns=columns))
        self._asked += len(questions)
        return self.one_each(questions)

    def one_each(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Return one rollout per prompt, in order; drop the additional rows that engines add for training.

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
        # Engines put additional rows, such as drafts or a greedy answer, after the answers to a prompt.
        return tuple(waiting[prompt.uid].pop(0) for prompt in prompts)


def _engines_in(engine: Any) -> Iterator[Any]:
    """Yield an engine and the engines nested in it."""
    while engine is not None:
        yield engine
        engine = getattr(engine, "engine", None)


def _game_of(engine: Any) -> Game | None:
    """Return the game of an engine or of an engine nested in it; None without a game."""
    games = (getattr(one, "game", None) for one in _engines_in(engine))
    return next((game for game in games if isinstance(game, Game)), None)


def as_conversation(row: Trajectory) -> Conversation:
    """Convert a rollout to a conversation; raise RowError if its answer is not text."""
    last = row.outcomes[-1]
    if last.text is None:
        raise RowError("this model makes images, so it holds no conversation; ask it by `answer`")
    messages = row.turns or (Message("assistant", (Part(last.text),)),)
    # Tool replies become lists of content blocks, and turns of the model become text.
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
    """Convert an outcome to its PIL image, the list of images of a video, or else its text."""
    if outcome.text is not None and outcome.image is None:
        return outcome.text
    images = images_of(outcome)
    return images if outcome.video is not None else images[0]


def images_of(outcome: Outcome) -> list[Any]:
    """Return an outcome's image, or the frames of its video, as PIL images; an empty list for text."""
    if outcome.image is not None:
        return [to_pil(outcome.image)]
    return [] if outcome.video is None else [to_pil(frame) for frame in outcome.video]


def _are_several(prompt: Any) -> bool:
    """Whether `prompt` holds several prompts (texts or conversations); raise RowError if it is invalid."""
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
