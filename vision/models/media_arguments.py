"""The images and videos of a prompt as arguments of a processor of transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from mmrl.core.types import Media, Prompt

TICKS = 1000  # frame times are given to processors as frame numbers of a video with 1000 frames per second
EDGES = {"shortest_edge", "longest_edge"}


def media_arguments(processor: Any, prompt: Prompt, pixels: Mapping[str, int]) -> dict[str, Any]:
    """Load the media of a prompt as arguments of its processor.

    `pixels` limits the size of images, where it is not empty.
    """
    from transformers.video_utils import VideoMetadata

    loaded = [(medium.kind, medium.load()) for medium in prompt.media]
    images = [frames.pixels[0] for kind, frames in loaded if kind == "image"]
    videos = [frames for kind, frames in loaded if kind == "video"]
    arguments: dict[str, Any] = {}
    if images:
        # Processors take a list of images for each text.
        arguments |= {"images": [images], "images_kwargs": {"size": pixels} if pixels else {}}
    if videos:
        of_videos = getattr(processor, "video_processor", None)
        if of_videos is None:
            raise ValueError(f"prompt '{prompt.uid}' shows a video, but this model takes images only")
        # Frames were sampled when the video was decoded; the processor only needs their times.
        metadata = []
        for video in videos:
            times = video.times.tolist()
            # Processors divide the covered time by the number of frames, for the seconds per frame.
            covered = len(times) * (times[1] - times[0]) if len(times) > 1 else video.duration
            frames, ticks = [round(t * TICKS) for t in times], max(1, round(covered * TICKS))
            metadata.append(
                VideoMetadata(
                    total_num_frames=ticks, fps=TICKS, frames_indices=frames, duration=video.duration
                )
            )
        options = {"video_metadata": metadata, "do_sample_frames": False, "return_metadata": True}
        options |= video_size_options(of_videos)
        arguments |= {"videos": [video.pixels for video in videos], "videos_kwargs": options}
    return arguments


def video_size_options(processor: Any) -> dict[str, Any]:
    """Make the options with which a video processor does not enlarge frames.

    That would undo the data's pixel budget, and Qwen's does it.
    """
    size = size_limits(processor)
    if size.keys() != EDGES:
        return {}
    smallest = (processor.patch_size * processor.merge_size) ** 2
    return {"size": {**size, "shortest_edge": min(size["shortest_edge"], smallest)}}


def digest_of(medium: Media) -> bytes:
    """Hash what an image or a video shows, and when."""
    frames = medium.load()
    digest = hashlib.blake2b(repr((medium.kind, frames.pixels.shape, frames.duration)).encode())
    for tensor in (frames.pixels, frames.times):
        digest.update(tensor.contiguous().numpy())
    return digest.digest()


def size_limits(processor: Any) -> dict[str, int]:
    """Read the limits on size that an image or video processor has set."""
    return {name: value for name, value in dict(processor.size).items() if value}
