"""Decoding videos: frames at chosen seconds, upright, within a pixel budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.types import Frames
from mmrl.data.media import CONTAINERS, MediaError, opened_container, opened_video, upright
from mmrl.data.sound import read_track

LATEST = 1 << 62  # a time after all frames; seeking to it finds the last key frame


@dataclass(frozen=True)
class FrameSampling:
    """Number and size of the frames sampled from a video, at equal distances.

    Args:
        frames_per_second: Sampling rate, within the bounds on the number of frames.
        min_frames: Minimal number of frames.
        max_frames: Maximal number of frames.
        multiple_of: The number of frames is a multiple of this number.
        max_pixels: Maximal pixels (width x height) of a frame; larger frames are shrunk and keep their aspect
            ratio. 0: no limit.
        total_pixels: Maximum number of pixels of all frames together. 0: no limit.
        start: Second at which sampling begins; None: the start of the video.
        end: Second at which sampling ends; None: the end of the video.
        load_audio_from_video: Read the sound track, too, from the first sampled frame on.
    """

    frames_per_second: float = 2.0
    min_frames: int = 4
    max_frames: int = 256
    multiple_of: int = 2
    max_pixels: int = 0
    total_pixels: int = 0
    start: float | None = None
    end: float | None = None
    load_audio_from_video: bool = False


def read_video(path: Path, sampling: FrameSampling = FrameSampling()) -> Frames:
    """Decode the sampled frames of a video, upright.

    `Frames.sound` is None for a video without a sound track. Variable frame rates, rotated videos and files
    without a duration are read as a player shows them. Raises `MediaError` for a damaged file, and for a file
    that ends before the duration in its header.
    """
    from av.video.reformatter import VideoReformatter

    with opened_video(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        zero, duration = _timing(path, container)
        times = _times_within(path, duration, sampling)
        if times[0] > 1:
            # Seeks to the last key frame before the first sampled frame.
            container.seek(int((times[0] + zero) / stream.time_base), stream=stream)
        scaler = VideoReformatter()  # one for all frames: its setup takes longer than scaling a small frame
        images: list[Tensor] = []  # (3, height, width) each
        last = None
        for frame, until in _with_end(container.decode(stream), zero):
            while len(images) < len(times) and times[len(images)] < until:
                images.append(_scaled(frame, sampling, len(times), scaler))
            last = frame
            if len(images) == len(times):
                break
        if last is None:
            raise MediaError(f"'{path}' holds no frame that can be decoded")
        # A sound track is often slightly longer than the frames; a larger difference means a truncated file.
        if len(images) < len(times) and times[-1] - (last.time - zero) > max(1.0, 0.05 * duration):
            raise MediaError(
                f"'{path}' is cut short: its header has {duration:.2f} s, but its frames end at "
                f"{last.time - zero:.2f} s; copy the file again"
            )
        # After the last frame, repeat it until the end, as players do.
        images += [_scaled(last, sampling, len(times), scaler)] * (len(times) - len(images))
    sizes = {tuple(image.shape[1:]) for image in images}
    if len(sizes) > 1:
        raise MediaError(
            f"'{path}' changes its size: its frames have {sorted(sizes)} as height and width; encode it anew"
        )
    sound = None
    if sampling.load_audio_from_video:
        with opened_container(path, str(path), CONTAINERS, "a video") as container:
            end = math.inf if sampling.end is None else zero + sampling.end
            sound = read_track(container, str(path), zero + times[0], end)
    return Frames(torch.stack(images), torch.tensor(times, dtype=torch.float64), duration, sound)


def load_video(source: Path | bytes, name: str, sampling: FrameSampling | None = None) -> Frames:
    """Decode the sampled frames of a video file; this is the loader of the media kind "video"."""
    assert isinstance(source, Path), "a video inside a row"
    return read_video(source, sampling or FrameSampling())


def _times_within(path: Path, duration: float, sampling: FrameSampling) -> list[float]:
    """Compute the times in seconds of the frames to sample from a video that lasts `duration`."""
    begin, end = sampling.start or 0.0, duration if sampling.end is None else sampling.end
    if not 0 <= begin < end or begin >= duration:
        raise MediaError(
            f"'{path}' lasts {duration:.2f} s; there is nothing from {begin:.2f} s to {end:.2f} s"
        )
    return sample_times(begin, min(end, duration), sampling)


def sampled_size(path: Path, sampling: FrameSampling) -> tuple[int, int, int, float]:
    """Return (frames, height, width, seconds) of a video as `read_video` samples it, without decoding.

    Height and width are those before rotation: for a video turned by 90 degrees, `read_video` swaps them.
    """
    with opened_video(path) as container:
        _, duration = _timing(path, container)
        times, stream = _times_within(path, duration, sampling), container.streams.video[0]
        covered = len(times) * (times[1] - times[0]) if len(times) > 1 else duration
        return len(times), *_size_within(stream.height, stream.width, sampling, len(times)), covered


def sample_times(begin: float, end: float, sampling: FrameSampling) -> list[float]:
    """Compute the times in seconds of the sampled frames, at equal distances from `begin` on."""
    step = sampling.multiple_of
    count = min(
        max(round((end - begin) * sampling.frames_per_second), sampling.min_frames), sampling.max_frames
    )
    count = max(step, round(count / step) * step)
    if count < sampling.min_frames:  # rounding to `multiple_of` may exceed the bounds
        count += step
    if count > sampling.max_frames:
        count = max(step, count - step)
    return [begin + (end - begin) * i / count for i in range(count)]  # without `end` itself


def _timing(path: Path, container: Any) -> tuple[float, float]:
    """Return (start, duration) of the frames in seconds, from the stream, container or packets."""
    stream = container.streams.video[0]
    zero = float(stream.start_time * stream.time_base) if stream.start_time else 0.0
    if stream.duration:
        duration = float(stream.duration * stream.time_base)
        if "mp4" in container.format.name:  # its stream duration may be too short
            container.seek(LATEST, stream=stream)
            duration = max(duration, _last_end(container) - zero)
            container.seek(stream.start_time or 0, stream=stream)
        return zero, duration
    # Unless the first frame is at 0, this duration is ambiguous (counted from 0 or from it): read packets.
    if container.duration and abs(zero) < 0.1:
        return zero, container.duration / 1e6  # microseconds
    last = _last_end(container)
    if last <= 0:
        raise MediaError(f"'{path}' does not say how long it lasts, and its packets carry no times")
    container.seek(0)
    return zero, last - zero


def _last_end(container: Any) -> float:
    """Return the end time of the last remaining packet in seconds; 0 if packets have no times."""
    packets = (packet for packet in container.demux(container.streams.video[0]) if packet.pts is not None)
    ends = (float((packet.pts + (packet.duration or 0)) * packet.time_base) for packet in packets)
    return max(ends, default=0.0)


def _with_end(frames: Iterable[Any], zero: float) -> Iterator[tuple[Any, float]]:
    """Pair every frame with the time in seconds until which the frame is displayed."""
    timed = (frame for frame in frames if frame.time is not None)
    for frame, following in pairwise(chain(timed, [None])):
        if following is not None:
            yield frame, following.time - zero - 5e-4  # minus 0.5 ms, as times in files are rounded
        else:
            length = float(frame.duration * frame.time_base) if frame.duration else 0.0
            yield frame, frame.time - zero + max(length, 1e-3)


def _size_within(height: int, width: int, sampling: FrameSampling, count: int) -> tuple[int, int]:
    """Shrink the height and width of `count` frames to the pixel limits."""
    limits = [sampling.max_pixels, max(1, sampling.total_pixels // count) if sampling.total_pixels else 0]
    limit = min([limit for limit in limits if limit] or [width * height])
    shrink = min(1.0, math.sqrt(limit / (width * height)))
    return max(1, math.floor(height * shrink)), max(1, math.floor(width * shrink))


def _scaled(frame: Any, sampling: FrameSampling, count: int, scaler: Any) -> Tensor:
    """Convert a frame to an upright (3, height, width) uint8 image within the pixel limits."""
    height, width = _size_within(frame.height, frame.width, sampling, count)
    # AREA averages the source pixels of every output pixel, so that shrinking does not alias.
    scaled = scaler.reformat(frame, width=width, height=height, format="rgb24", interpolation="AREA")
    array = scaled.to_ndarray()
    return upright(torch.from_numpy(array), frame).permute(2, 0, 1).contiguous()


def video_duration(path: Path) -> float:
    """Read the duration of a video in seconds, without decoding its frames."""
    with opened_video(path) as container:
        return _timing(path, container)[1]
