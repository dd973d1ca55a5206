"""Using a model: texts, images and videos in, texts or images out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mmrl.config.plain import as_list
from mmrl.core.protocols import Engine
from mmrl.core.types import Outcome, Prompt, Rollouts
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

    def outcomes(self, prompts: Sequence[Prompt]) -> list[Outcome]:
        """Answer prompts, in order."""
        # Engines that add rows for training, such as drafts or a greedy answer, put them last.
        return [row.outcomes[-1] for row in self.rollout(prompts)[: len(prompts)]]

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
            return [as_answer(outcome) for outcome in self.ask(prompt, images, videos)]
        (outcome,) = self.ask([prompt], [images], [videos])
        return as_answer(outcome)

    def ask(self, prompts: Sequence[Any], images: Any = None, videos: Any = None) -> list[Outcome]:
        """Answer questions like `answer`; `images` and `videos` have those of every question, in order."""
        asked, read = [], self.media_reader()
        media = _per_prompt(images, len(prompts), "images"), _per_prompt(videos, len(prompts), "videos")
        for prompt, shown, filmed in zip(prompts, *media, strict=True):
            lists = as_list(shown), as_list(filmed)  # a single one may stand by itself
            asked.append(prompt_of(f"p{self._asked + len(asked)}", prompt, *lists, read=read))
        self._asked += len(asked)
        return self.outcomes(asked)


def as_answer(outcome: Outcome) -> Any:
    """Return the text of an outcome, its image for PIL, or the frames of its video as a list of these."""
    if outcome.text is not None:
        return outcome.text
    images = images_of(outcome)
    return images if outcome.video is not None else images[0]


def images_of(outcome: Outcome) -> list[Any]:
    """Return the image of an outcome for PIL, or the frames of its video; none where it is a text."""
    if outcome.image is not None:
        return [_to_pil(outcome.image)]
    return [] if outcome.video is None else [_to_pil(frame) for frame in outcome.video]


def _to_pil(image: Tensor) -> Any:
    """Convert an image (3, height, width) uint8 to PIL."""
    from PIL import Image

    return Image.fromarray(image.cpu().permute(1, 2, 0).contiguous().numpy())


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
