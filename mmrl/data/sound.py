"""Decoding sounds: files, sound tracks of videos and arrays, as one channel of float32 samples."""

from __future__ import annotations

import io
import math
import struct
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.types import Media, Sound
from mmrl.data.media import CONTAINERS, MediaError, opened_container

SOUNDS = f"{CONTAINERS},wav,w64,aiff,caf,flac,mp3,aac"
ESTIMATED = {"mp3", "aac", "mpegts", "mpeg"}  # formats with inexact durations in the header
MAX_SAMPLES = 1 << 29  # 3 hours at 48 kHz
GAP = 0.1  # seconds; longer gaps between time stamps become silence, shorter gaps are rounding errors
FULL = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}  # integer that stands for 1.0
STREAMED = (1 << 31) - (1 << 16)  # larger sizes in a WAV header mean "unknown" (streams)
MAX_CHUNKS = 256  # most chunks of a WAV file that are skipped before its samples
FLOAT_WAV = 3  # the format tag of floating-point samples


def load_sound(source: Path | bytes, name: str, sampling: Any = None) -> Sound:
    """Decode a sound file, or the bytes of one; this is the loader of the media kind "audio".

    Channels are averaged. The sampling rate of the file is kept. Raises `MediaError` for a damaged file, and
    for a file without a sound.
    """
    with opened_container(source, name, SOUNDS, "a sound") as container:
        _check_wav(source, name)
        sound = read_track(container, name)
    if sound is None:
        raise MediaError(f"'{name}' holds no sound")
    return sound


def read_track(container: Any, name: str, begin: float | None = None, end: float = math.inf) -> Sound | None:
    """Decode the first sound track of a PyAV container, from `begin` to `end` (seconds in the file).

    Without `begin`, the sound begins with its first sample. Returns None for a file without a sound track.
    """
    import av

    if not container.streams.audio:
        return None
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise MediaError(f"'{name}' holds a sound in a codec that this build of ffmpeg does not know")
    converter = av.AudioResampler(format="fltp")  # keeps rate and channels
    parts, count, rate = list[Tensor](), 0, stream.rate
    for frame in container.decode(stream):
        if begin is None:
            begin = frame.time or 0.0
        for converted in converter.resample(frame):
            samples = torch.from_numpy(converted.to_ndarray()).mean(0)
            first = count if frame.time is None else round((frame.time - begin) * rate)
            if first < 0 and not count:
                samples = samples[-first:]
            elif first - count > (GAP * rate if count else 0):
                parts.append(torch.zeros(min(first - count, MAX_SAMPLES)))
                count += len(parts[-1])
            parts.append(samples)
            count += len(samples)
        if count > MAX_SAMPLES:
            raise MediaError(f"'{name}' holds more than {MAX_SAMPLES} samples; cut it into pieces")
        if count >= (end - (begin or 0.0)) * rate:
            break
    _check_whole(name, container, count / rate + (begin or 0.0), end)
    return checked(torch.cat([*parts, torch.zeros(0)])[: _length(end, begin or 0.0, rate)], rate, name)


def _length(end: float, begin: float, rate: int) -> int | None:
    return None if math.isinf(end) else round((end - begin) * rate)


def _check_whole(name: str, container: Any, last: float, end: float) -> None:
    """Raise `MediaError` if a sound ends at `last` seconds, long before the end in the file's header."""
    stream = container.streams.audio[0]
    if not stream.duration or ESTIMATED & set(container.format.name.split(",")):
        return
    wanted = min(float((stream.start_time or 0) + stream.duration) * float(stream.time_base), end)
    if wanted - last > max(1.0, 0.05 * wanted):
        raise MediaError(
            f"'{name}' is cut short: its header has {wanted:.2f} s, but its sound ends at {last:.2f} s; "
            "copy the file again"
        )


def _check_wav(source: Path | bytes, name: str) -> None:
    """Raise `MediaError` for a truncated WAV file, which ffmpeg would read as a shorter sound."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        if (begin := file.read(12))[:4] != b"RIFF" or begin[8:] != b"WAVE":
            return
        for _ in range(MAX_CHUNKS):
            if len(head := file.read(8)) < 8:
                return
            kind, size = struct.unpack("<4sI", head)
            first = file.tell()
            if kind != b"data":
                file.seek(first + size + size % 2)
                continue
            held = file.seek(0, io.SEEK_END) - first
            if 0 < held < size < STREAMED:
                raise MediaError(
                    f"'{name}' is cut short: its header has {size} bytes of samples, and {held} are there; "
                    "copy the file again"
                )
            return


def checked(samples: Tensor, rate: int, name: str) -> Sound:
    """Create a `Sound` from samples; raise `MediaError` for no samples, and for NaN or infinity."""
    if not len(samples):
        raise MediaError(f"'{name}' holds a sound of no samples")
    if not samples.isfinite().all():
        raise MediaError(f"'{name}' holds samples that are NaN or infinite")
    return Sound(samples.contiguous(), rate)


def sound_duration(source: Path | bytes) -> float:
    """Read the duration of a sound in seconds from its header; infinity if the header lacks it.

    Raises `MediaError` for a file without a sound, and for an unknown codec.
    """
    name = str(source) if isinstance(source, Path) else "the sound"
    with opened_container(source, name, SOUNDS, "a sound") as container:
        _check_wav(source, name)
        if not container.streams.audio:
            raise MediaError(f"'{name}' holds no sound")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise MediaError(f"'{name}' holds a sound in a codec that this build of ffmpeg does not know")
        if stream.duration:
            return float(stream.duration * stream.time_base)
        return container.duration / 1e6 if container.duration else math.inf


def resampled(sound: Sound, rate: int) -> Tensor:
    """Return the samples (T,) of a sound at another rate, by the band-limited resampler of ffmpeg."""
    import av

    if sound.rate == rate:
        return sound.samples
    frame = av.AudioFrame.from_ndarray(sound.samples[None].numpy(), format="fltp", layout="mono")
    frame.sample_rate = sound.rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    samples = torch.cat([*(torch.from_numpy(part.to_ndarray()[0]) for part in parts), torch.zeros(0)])
    length = max(1, round(len(sound.samples) * rate / sound.rate))
    return torch.nn.functional.pad(samples[:length], (0, max(0, length - len(samples))))


# ---- sounds in memory


def sound_in_memory(value: Any, place: str) -> Media | None:
    """Convert an object with `array` and `sampling_rate`, as `datasets.Audio` makes it, to a medium.

    An array is (T,) or (channels, T), of floating-point numbers from -1 to 1, or of int16, int32 or uint8.
    Returns None for other objects.
    """
    match value:
        case {"array": array, "sampling_rate": int(rate)} if array is not None and rate > 0:
            pass
        case object(get_all_samples=decode):  # an `AudioDecoder` of torchcodec, in newer versions
            array, rate = decode().data, decode().sample_rate
        case _:
            return None
    data = as_wav(checked(_one_channel(array, place), rate, place))
    return Media("audio", place, lambda: load_sound(data, place), data)


def _one_channel(value: Any, name: str) -> Tensor:
    """Convert an array to one channel of float32 samples (T,)."""
    import numpy

    array = value.detach().cpu().float().numpy() if isinstance(value, Tensor) else numpy.asarray(value)
    kind = str(array.dtype)
    if array.ndim not in (1, 2) or not (array.dtype.kind == "f" or kind in FULL):
        raise MediaError(
            f"'{name}' is an array {array.shape} of {kind}; wanted samples (T,) or (channels, T), of "
            "floating-point numbers from -1 to 1, or of int16, int32 or uint8"
        )
    if kind in FULL:
        array = (array.astype("float64") - (128 if kind == "uint8" else 0)) / FULL[kind]
    samples = torch.from_numpy(array.astype("float32"))
    return samples if array.ndim == 1 else samples.mean(int(array.shape[0] > array.shape[1]))


def plain_sounds(value: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """Convert a decoded sound (see `sound_in_memory`) to WAV bytes for storage in a row, else None."""
    medium = sound_in_memory(value, place)
    return medium and {"bytes": medium.source, "path": None}


def as_wav(sound: Sound, *, bits: int = 32) -> bytes:
    """Encode a sound as a WAV file of 32-bit floating-point numbers, or of 16-bit integers."""
    if bits == 16:
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setparams((1, 2, sound.rate, 0, "NONE", ""))
            file.writeframes((sound.samples.clamp(-1, 1) * 32767).round().short().numpy().tobytes())
        return buffer.getvalue()
    data = sound.samples.numpy().astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", FLOAT_WAV, 1, sound.rate, 4 * sound.rate, 4, 32)
    chunks = b"".join(_chunks(("fmt ", form), ("data", data)))
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _chunks(*named: tuple[str, bytes]) -> Iterator[bytes]:
    for name, data in named:
        yield name.encode() + struct.pack("<I", len(data)) + data


def as_array(sound: Sound) -> dict[str, Any]:
    """Convert a sound to the object that `datasets.Audio` makes, for rewards in TRL's form."""
    return {"array": sound.samples.numpy(), "sampling_rate": sound.rate}
