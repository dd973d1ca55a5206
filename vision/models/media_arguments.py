"""The media of a prompt as arguments of a processor of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Frames, Prompt

TICKS = 1000  # processors get frame times as frame numbers of a video with 1000 frames per second
EDGES = {"shortest_edge", "longest_edge"}


def media_arguments(processor: Any, prompt: Prompt, pixels: Mapping[str, int]) -> dict[str, Any]:
    """Load the media of a prompt as arguments of its processor.

    `pixels` limits the size of images, unless it is empty. Raises ValueError for a kind of media that the
    processor does not support.
    """
    arguments: dict[str, Any] = {}
    for kind, modality in MODALITIES.items():
        if loaded := [medium.load() for medium in prompt.media if medium.kind == kind]:
            try:
                arguments |= modality.arguments(processor, loaded, pixels)
            except ValueError as error:
                raise ValueError(f"prompt '{prompt.uid}' shows a {kind}, but {error}") from error
    return arguments


def image_arguments(processor: Any, images: Sequence[Frames], pixels: Mapping[str, int]) -> dict[str, Any]:
    """Make the arguments of a processor for images."""
    options = {"size": dict(pixels)} if pixels else {}
    # Processors take a list of images for each text.
    return {"images": [[frames.pixels[0] for frames in images]], "images_kwargs": options}


def video_arguments(processor: Any, videos: Sequence[Frames], pixels: Mapping[str, int]) -> dict[str, Any]:
    """Make the arguments of a processor for videos with already sampled frames and their times."""
    from transformers.video_utils import VideoMetadata

    video_processor = getattr(processor, "video_processor", None)
    if video_processor is None:
        raise ValueError("this model takes images only")
    metadata = []
    for video in videos:
        times = video.times.tolist()
        # Processors divide the covered time by the number of frames to get the seconds per frame.
        covered = len(times) * (times[1] - times[0]) if len(times) > 1 else video.duration
        frames, ticks = [round(t * TICKS) for t in times], max(1, round(covered * TICKS))
        metadata.append(
            VideoMetadata(total_num_frames=ticks, fps=TICKS, frames_indices=frames, duration=video.duration)
        )
    options = {"video_metadata": metadata, "do_sample_frames": False, "return_metadata": True}
    options |= video_size_options(video_processor)
    return {"videos": [video.pixels for video in videos], "videos_kwargs": options}


def video_size_options(processor: Any) -> dict[str, Any]:
    """Make the options that keep a video processor from enlarging frames.

    Qwen's video processor enlarges them by default, which would undo the pixel budget of the data.
    """
    size = size_limits(processor)
    if size.keys() != EDGES:
        return {}
    smallest = (processor.patch_size * processor.merge_size) ** 2
    return {"size": {**size, "shortest_edge": min(size["shortest_edge"], smallest)}}


def size_limits(processor: Any) -> dict[str, int]:
    """Return the size limits of an image or video processor, without unset limits."""
    return {name: value for name, value in dict(processor.size).items() if value}
