"""Checks of prompts for a pipeline before its weights are loaded: images, length of texts, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmrl.config import objects
from mmrl.config.registry import find
from mmrl.config.schema import Piece
from mmrl.core.types import Prompt, reading
from mmrl.data.media import upright_size
from mmrl.diffusion.loading import load_pipeline
from mmrl.diffusion.model_family import PipelineFamily, family_of, reading_words, sizes_of
from mmrl.diffusion.sizes import FrameSize, check_engine_size, result_size
from mmrl.runtime.modules import loading_onto


class FlowPromptCheck:
    """Callable that raises `PromptError` if a pipeline cannot handle a prompt's text, images or size.

    Args:
        model: Hub id or folder of the pipeline.
        max_sequence_length: Maximum tokens of a prompt; 0: the pipeline's default.
    """

    def __init__(self, model: str, max_sequence_length: int = 0) -> None:
        self.pipe = _load_without_weights(model)
        self.family = family_of(type(self.pipe).__name__)
        self.longest = max_sequence_length or self.family.default_length(self.pipe)
        self.size: FrameSize | None = None  # result size in the engine's options

    def check_engine(self, engine: Piece) -> None:
        """Check the result size in an engine's options, and check later prompts against this engine.

        Raises `ConfigError` if the model cannot generate this size.
        """
        size_from = getattr(find("engine", engine.name).target, "size_from", None)
        size = size_from and size_from(engine.options)
        if size and all(type(side) is int for side in size):  # skip sizes that follow a schedule
            check_engine_size(self.family, self.pipe, size, engine.name)
            self.size = size

    def __call__(self, prompt: Prompt) -> None:
        """Raise `PromptError` if the pipeline cannot handle a prompt."""
        with reading(prompt), reading_words(self.pipe, prompt.text) as words:
            self.family.check_images(prompt)
            if type(self.family).check_source is not PipelineFamily.check_source:
                for image in (image for image in prompt.media if image.source is not None):
                    width, height = upright_size(image.source, image.name)
                    self.family.check_source(self.pipe, height, width)
            self.family.check_text(self.pipe, words, self.longest)
            if self.size:
                result_size(self.family, self.pipe, prompt, self.size)

    def outcomes(self, prompt: Prompt) -> list[tuple[str, FrameSize]]:
        """List kind and size of the engine's result, or without an engine those of the recorded answers.

        Raises `PromptError` if the model cannot generate the size.
        """
        if self.size is None:
            sizes = sizes_of(prompt.answers)
            return [("video" if f > 1 else "image", (f, height, width)) for f, height, width in sizes]
        with reading(prompt):
            size = frames, height, width = result_size(self.family, self.pipe, prompt, self.size)
            axes = len(self.family.latent_shape(self.pipe, height, width, frames))
            return [("image" if axes == 3 else "video", size)]


def check_recorded(options: Mapping[str, Any], prompts: Sequence[Prompt]) -> dict[int, str]:
    """Map prompt indices to the reason why a recorded image or video cannot be trained on.

    Sizes are read from file headers, without decoding.
    """
    pipe = _load_without_weights(str(options["model"]))
    family, faults, wrong = family_of(type(pipe).__name__), dict[tuple[int, ...], str](), {}
    if family.refuses_recorded:
        return {i: family.refuses_recorded for i, prompt in enumerate(prompts) if prompt.answers}
    for index, prompt in enumerate(prompts):
        for frames, height, width in sizes_of(prompt.answers):
            if (size := (frames, height, width)) not in faults:
                try:
                    family.latent_shape(pipe, height, width, frames)
                    faults[size] = ""
                except ValueError as error:
                    faults[size] = str(error)
            if faults[size]:
                wrong[index] = faults[size]
    return wrong


def _load_without_weights(model: str) -> Any:
    """Load the configurations and tokenizers of a pipeline, once for all checks of a run."""
    if objects.is_object(model):
        return load_pipeline(model, dtype="float32")
    files = sorted(file for file in Path(model).rglob("*") if file.is_file())  # none for a hub id
    return _load(model, tuple((file, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=1)
def _load(model: str, files: tuple[tuple[Path, int], ...]) -> Any:
    """Load a pipeline without weights; `files`, with their times, tell when a folder has changed."""
    with loading_onto(None, empty=True):
        return load_pipeline(model, dtype="float32")
