"""Sizes of generated images and videos: checks, sizes set by prompts, and grouping of rows by size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.core.types import Prompt
from mmrl.data.media import upright_size
from mmrl.diffusion.model_family import PipelineFamily

FrameSize = tuple[int, int, int]  # (frames, height, width); an image has one frame


def check_engine_size(family: PipelineFamily, pipe: Any, size: FrameSize, engine: str) -> None:
    """Raise `ConfigError` unless the model can generate the result size in an engine's options."""
    frames, height, width = size
    try:
        family.latent_shape(pipe, height, width, frames)
    except ValueError as error:
        raise ConfigError(f"`height`, `width` or `num_frames` of `{engine}`: {error}") from error


def result_size(family: PipelineFamily, pipe: Any, prompt: Prompt, usual: FrameSize) -> FrameSize:
    """Return the size of the result for a prompt: its own size, or else the engine's size `usual`.

    Raises `ValueError` if the model cannot generate this size. Reads at most the header of an image.
    """
    if (asked := prompt.size) is None:
        return usual
    frames, height, width = usual
    frames, height, width = asked.num_frames or frames, asked.height or height, asked.width or width
    if asked.source:
        if not prompt.media or (source := prompt.media[0].source) is None:
            raise ValueError("it asks for the size of its source image, but has no image")
        wide, high = upright_size(source, prompt.media[0].name)
        height, width = family.source_size(pipe, high, wide, height * width)
    family.latent_shape(pipe, height, width, frames)
    return frames, height, width


def places_by(keys: Iterable[Hashable]) -> list[list[int]]:
    """Group the indices of equal keys; the groups are in order of first appearance."""
    places: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return [*places.values()]
