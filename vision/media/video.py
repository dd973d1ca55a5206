"""Decoding clips by timestamps: which picture was on screen at which second."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmrl.core.types import Frames
from mmrl.data.media import MediaError, opened_video, upright


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a clip are looked at, and how large.

    Frames stand at equal distances from `start` to `end` (seconds; None: the whole clip), at
    `frames_per_second` but never fewer than `min_frames` nor more than `max_frames`, their number a multiple
    of `multiple_of`. A frame has at most `max_pixels`, all frames together at most `total_pixels` (0: no
    limit); the aspect ratio is kept.
    """

    frames_per_second: float = 2.0
    min_frames: int = 4
    max_frames: int = 256
    multiple_of: int = 2
    max_pixels: int = 0
    total_pixels: int = 0
    start: float | None = None
    end: float | None = None


def read_video(path: Path, sampling: FrameSampling = FrameSampling()) -> Frames:
    """Decode the frames that `sampling` asks for, as uint8 with their times in seconds, upright.

    Variable frame rates, rotated clips and files without a duration are read as they play. A file that is
    broken, or ends before it says it does, is an error.
    """
    with opened_video(path) as container:
        return _read(path, container, sampling)


def _read(path: Path, container, sampling: FrameSampling) -> Frames:
    from av.video.reformatter import VideoReformatter

    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    zero = _zero(stream)
    duration = _duration(path, container, stream)
    begin, end = sampling.start or 0.0, duration if sampling.end is None else sampling.end
    if not 0 <= begin < end or begin >= duration:
        raise MediaError(
            f"'{path}' lasts {duration:.2f} s; there is nothing from {begin:.2f} s to {end:.2f} s"
        )
    wanted = sample_times(begin, min(end, duration), sampling)
    if begin > 1:
        container.seek(int((begin + zero) / stream.time_base), stream=stream)
    scaler = VideoReformatter()  # setting one up takes longer than scaling a small frame
    pictures, last = [], None
    for shown, until in _shown(container.decode(stream), zero):
        while len(pictures) < len(wanted) and wanted[len(pictures)] < until:
            pictures.append(_picture(shown, sampling, len(wanted), scaler))
        last = shown
        if len(pictures) == len(wanted):
            break
    if last is None:
        raise MediaError(f"'{path}' holds no frame that can be decoded")
    if len(pictures) < len(wanted):
        _refuse_cut(path, last.time - zero, wanted[-1], duration)
        rest = _picture(last, sampling, len(wanted), scaler)
        pictures += [rest] * (len(wanted) - len(pictures))
    sizes = {tuple(picture.shape[1:]) for picture in pictures}
    if len(sizes) > 1:
        raise MediaError(
            f"'{path}' changes its size: its frames have {sorted(sizes)} as height and width; encode it anew"
        )
    return Frames(torch.stack(pictures), torch.tensor(wanted, dtype=torch.float64), duration)


def sample_times(begin: float, end: float, sampling: FrameSampling) -> list[float]:
    """List the seconds at which frames are looked at: the first at `begin`, all at equal distances."""
    step = sampling.multiple_of
    count = min(
        max(round((end - begin) * sampling.frames_per_second), sampling.min_frames), sampling.max_frames
    )
    count = max(step, round(count / step) * step)
    if count < sampling.min_frames:
        count += step
    if count > sampling.max_frames:
        count = max(step, count - step)
    return [begin + (end - begin) * i / count for i in range(count)]


def _duration(path: Path, container, stream) -> float:
    """Find out how long the pictures last: what the stream says, else the container, else the last frame."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    zero = _zero(stream)
    # Where pictures start late, formats do not agree on whether a header counts from 0; packets tell.
    if container.duration and abs(zero) < 0.1:
        return container.duration / 1e6
    last = 0.0
    for packet in container.demux(stream):
        if packet.pts is not None:
            last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    if last <= 0:
        raise MediaError(f"'{path}' does not say how long it lasts, and its packets carry no times")
    container.seek(0)
    return last - zero


def _zero(stream) -> float:
    """Find the second that a file gives its first picture."""
    return float(stream.start_time * stream.time_base) if stream.start_time else 0.0


def _shown(frames, zero: float) -> Iterator[tuple]:
    """Pair every frame with the second at which the next one replaces it."""
    before = None
    for frame in frames:
        if frame.time is None:
            continue
        if before is not None:
            # Half a millisecond of tolerance: times of files are rounded.
            yield before, frame.time - zero - 5e-4
        before = frame
    if before is not None:
        length = float(before.duration * before.time_base) if before.duration else 0.0
        yield before, before.time - zero + max(length, 1e-3)


def _refuse_cut(path: Path, last: float, wanted: float, duration: float) -> None:
    """Tell a clip whose sound is a little longer than its pictures from one that was cut off."""
    if wanted - last > max(1.0, 0.05 * duration):
        raise MediaError(
            f"'{path}' is cut short: it says {duration:.2f} s, but its pictures end at {last:.2f} s; "
            "copy the file again"
        )


def _picture(frame, sampling: FrameSampling, count: int, scaler) -> Tensor:
    """Turn a frame into an upright (3, height, width) uint8 picture inside the pixel limits."""
    width, height = frame.width, frame.height
    limits = [sampling.max_pixels, max(1, sampling.total_pixels // count) if sampling.total_pixels else 0]
    limit = min([limit for limit in limits if limit] or [width * height])
    shrink = min(1.0, math.sqrt(limit / (width * height)))
    width, height = max(1, math.floor(width * shrink)), max(1, math.floor(height * shrink))
    scaled = scaler.reformat(frame, width=width, height=height, format="rgb24", interpolation="AREA")
    array = scaled.to_ndarray()
    return upright(torch.from_numpy(array), frame).permute(2, 0, 1).contiguous()


def video_duration(path: Path) -> float:
    """Read how many seconds a clip lasts, without decoding it."""
    with opened_video(path) as container:
        return _duration(path, container, container.streams.video[0])
