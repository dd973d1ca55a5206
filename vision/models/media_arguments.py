"""Conversion of a prompt's media to the arguments of a transformers processor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Frames, Prompt, Sound
from mmrl.data.sound import resampled

TICKS = 1000  # processors get frame times as frame numbers of a video with 1000 frames per second
EDGES = {"shortest_edge", "longest_edge"}


def media_arguments(processor: Any, prompt: Prompt, pixels: Mapping[str, int]) -> dict[str, Any]:
    """Load the media of a prompt, and return them as arguments of the processor.

    `pixels` limits the size of images, unless it is empty. Raises ValueError for a kind of media that the
    processor does not support.
    """
    arguments: dict[str, Any] = {}
    loaded = [(medium.kind, medium.load()) for medium in prompt.media]
    for kind, modality in MODALITIES.items():
        if of_kind := [one for own, one in loaded if own == kind]:
            try:
                arguments |= modality.arguments(processor, of_kind, pixels)
            except ValueError as error:
                article = "an" if kind[0] in "aeiou" else "a"
                raise ValueError(f"prompt '{prompt.uid}' shows {article} {kind}, but {error}") from error
    try:
        return with_tracks(processor, loaded, arguments)
    except ValueError as error:
        raise ValueError(f"prompt '{prompt.uid}' shows videos with sound, but {error}") from error


def image_arguments(processor: Any, images: Sequence[Frames], pixels: Mapping[str, int]) -> dict[str, Any]:
    """Create the processor arguments for images; `pixels` are size limits, or empty."""
    check_images(processor)
    options = {"size": dict(pixels)} if pixels else {}
    # One list of images for each text of the batch, here a single one.
    return {"images": [[frames.pixels[0] for frames in images]], "images_kwargs": options}


def check_images(processor: Any) -> None:
    """Raise ValueError for a processor that pads images together, such as that of Emu3."""
    images = getattr(processor, "image_processor", None)
    if getattr(images, "do_pad", False) and not hasattr(images, "backend"):
        raise ValueError("its tokens would depend on other images, with which its processor pads it")


def video_arguments(processor: Any, videos: Sequence[Frames], pixels: Mapping[str, int]) -> dict[str, Any]:
    """Create the processor arguments for videos whose frames are already sampled, with frame times."""
    from transformers.video_utils import VideoMetadata

    video_processor = getattr(processor, "video_processor", None)
    if video_processor is None:
        raise ValueError("this model takes images only")
    metadata = []
    for video in videos:
        times = video.times.tolist()
        # Set the total number of frames so that the processor computes the right number of seconds per frame.
        covered = len(times) * (times[1] - times[0]) if len(times) > 1 else video.duration
        frames, ticks = [round(t * TICKS) for t in times], max(1, round(covered * TICKS))
        metadata.append(
            VideoMetadata(total_num_frames=ticks, fps=TICKS, frames_indices=frames, duration=video.duration)
        )
    options = {"video_metadata": metadata, "do_sample_frames": False, "return_metadata": True}
    options |= video_size_options(video_processor)
    # Copy frames: the processor of Ernie 4.5-VL draws time stamps onto them in place.
    return {"videos": [video.pixels.clone() for video in videos], "videos_kwargs": options}


def about_short_videos(media: Mapping[str, Any]) -> str:
    """Return advice if a video has only one frame, which some processors refuse; otherwise empty."""
    short = any(len(pixels) < 2 for pixels in media.get("videos", ()))
    return "; a video of one frame is too short for some models: show it as an image" if short else ""


def audio_arguments(processor: Any, sounds: Sequence[Sound], pixels: Mapping[str, int]) -> dict[str, Any]:
    """Create the processor arguments for sounds, resampled to the rate that the processor expects."""
    extractor = extractor_of(processor)
    rate = extractor.sampling_rate
    samples = [resampled(sound, rate).numpy() for sound in sounds]
    for sound in samples:
        check_seconds(processor, len(sound) / rate)
    options: dict[str, Any] = {"sampling_rate": rate}
    if hasattr(processor, "audio_seq_length") and not hasattr(processor, "audio_ms_per_token"):
        # Pad to a fixed length: Gemma 3n's features would depend on the longest sound of the prompt.
        options["padding"] = "max_length"
    return {"audio": samples, "audio_kwargs": options}


def extractor_of(processor: Any) -> Any:
    """Return the feature extractor of a processor; raise ValueError if the model reads no sounds."""
    extractor = getattr(processor, "feature_extractor", None)
    if extractor is None:
        raise ValueError("this model reads no sounds")
    return extractor


def check_seconds(processor: Any, seconds: float) -> None:
    """Raise ValueError if a sound is longer than the processor reads, or shorter than its window."""
    options, extractor = getattr(processor, "audio_kwargs", {}), extractor_of(processor)
    usual = signature(extractor.__call__).parameters.get("max_length")
    most = getattr(extractor, "n_samples", None) or (usual and usual.default) or math.inf
    longest = most / extractor.sampling_rate
    if options.get("truncation", True) and seconds > longest:
        raise ValueError(f"it lasts {seconds:.2f} s, and this model reads sounds of {longest:g} s; cut it")
    window = getattr(extractor, "n_fft", getattr(extractor, "frame_length", 1)) / extractor.sampling_rate
    if seconds < window:
        raise ValueError(f"it lasts {seconds:.4f} s, less than a window of the spectrum, {window:g} s")


def with_tracks(
    processor: Any, loaded: Sequence[tuple[str, Any]], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Add the sound tracks of videos to the arguments of a processor.

    `loaded` lists (kind, decoded medium) for all media of a prompt, in order. The processor interleaves the
    tokens of frames and sounds by time. Raises ValueError if the processor cannot do this, or if the videos
    with sound have different frame rates.
    """
    videos = [place for place, (kind, _) in enumerate(loaded) if kind == "video"]
    sounds = [one if kind == "audio" else getattr(one, "sound", None) for kind, one in loaded]
    if not any(sounds[place] for place in videos):
        return arguments
    if not hasattr(processor, "load_audio_from_video"):
        raise ValueError("this model reads videos without it; set `load_audio_from_video: false`")
    rates = [data.sampled_fps for data in arguments["videos_kwargs"]["video_metadata"]]
    heard = [rate for rate, place in zip(rates, videos, strict=True) if sounds[place]]
    if max(heard) > 1.001 * min(heard):
        raise ValueError(f"at {min(heard):g} and {max(heard):g} frames per second; sample them alike")
    order = [videos.index(at) if at in videos else None for at, sound in enumerate(sounds) if sound]
    return {
        **arguments,
        **audio_arguments(processor, [sound for sound in sounds if sound], {}),
        "videos_kwargs": {**arguments["videos_kwargs"], "fps": heard[0]},
        "audio_from_video_indices": order,
        "load_audio_from_video": True,
    }


def video_size_options(processor: Any) -> dict[str, Any]:
    """Return options that keep a video processor from enlarging frames.

    Qwen's video processor enlarges them by default, which would undo the pixel budget of the data.
    """
    size = size_limits(processor)
    if size.keys() != EDGES:
        return {}
    smallest = (processor.patch_size * processor.merge_size) ** 2
    return {"size": {**size, "shortest_edge": min(size["shortest_edge"], smallest)}}


def size_limits(processor: Any) -> dict[str, int]:
    """Return the size limits of an image or video processor, without unset limits."""
    return {name: value for name, value in dict(processor.size or {}).items() if value}
