"""JPEG thumbnails and short sounds of prompts and answers, for pages and parquet files."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core.tensor import linspace_indices
from mmrl.core.types import Media, Outcome, Prompt, Sound
from mmrl.data.media import MediaError
from mmrl.data.sound import as_wav, resampled

SIDE = 120  # height of the thumbnail of an answer, pixels
GAP = 2  # pixels between frames
SECONDS, RATE = 30, 16000  # maximum length of a sound in s; maximum sampling rate in Hz
MARK = re.compile(r"<(?:image|video): \d+ tokens>")  # placeholder of media in a conversation


def strip(frames: Tensor, *, height: int = 72, most: int = 4) -> bytes:
    """Encode up to `most` evenly spaced frames, (n, 3, height, width) uint8, side by side as one JPEG."""
    from PIL import Image

    shown = frames[linspace_indices(len(frames), most)]
    images = [Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in shown]
    # Enlarge small images by nearest neighbour: interpolation would invent pixels.
    resample = Image.Resampling.NEAREST if images[0].height < height else Image.Resampling.BICUBIC
    width = max(1, round(images[0].width * height / images[0].height))
    whole = Image.new("RGB", ((width + GAP) * len(images) - GAP, height), "white")
    for i, image in enumerate(images):
        whole.paste(image.resize((width, height), resample), (i * (width + GAP), 0))
    buffer = io.BytesIO()
    whole.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def of_prompt(prompt: Prompt) -> bytes | None:
    """Return a thumbnail of a prompt's first image or video; None if it has none or it is unreadable."""
    shown = next((one for one in _loaded(prompt) if hasattr(one, "pixels")), None)
    return None if shown is None else strip(shown.pixels)


def sound_of_prompt(prompt: Prompt) -> bytes | None:
    """Return the start of a prompt's first sound or of its video's sound as WAV; None without a sound."""
    sounds = (one if isinstance(one, Sound) else getattr(one, "sound", None) for one in _loaded(prompt))
    if (sound := next((one for one in sounds if one), None)) is None:
        return None
    sound = replace(sound, samples=sound.samples[: SECONDS * sound.rate])
    rate = min(RATE, sound.rate)
    return as_wav(Sound(resampled(sound, rate), rate), bits=16)


def _loaded(prompt: Prompt) -> Iterator[Any]:
    """Decode the media of a prompt one by one, until one is unreadable."""
    with suppress(MediaError):
        for medium in prompt.media:
            yield medium.load()


def of_outcome(outcome: Outcome) -> bytes | None:
    """Return a thumbnail of the image or video of an outcome; None unless its pixels are uint8."""
    frames = outcome.image[None] if outcome.image is not None else None
    frames = outcome.video if outcome.video is not None else frames
    shown = frames is not None and frames.dtype == torch.uint8 and frames.dim() == 4
    return strip(frames.cpu(), height=SIDE) if shown else None


def of_tools(shown: Sequence[Media]) -> list[bytes] | None:
    """Return thumbnails of the images from tools; None without any."""
    return [strip(image.load().pixels, height=SIDE) for image in shown] or None


def illustrated(conversation: str, shown: Sequence[bytes]) -> list[str | bytes]:
    """Split a conversation at placeholders such as `<image: 64 tokens>`, and insert the thumbnails.

    If the policy wrote placeholders itself, so that the numbers differ, all thumbnails come at the end.
    """
    marks = list(MARK.finditer(conversation))
    if len(marks) != len(shown):
        return [conversation, *shown]
    parts, at = [], 0
    for mark, image in zip(marks, shown, strict=True):
        parts += [conversation[at : mark.start()], image]
        at = mark.end()
    return [part for part in (*parts, conversation[at:]) if part]


def data_uri(data: bytes, form: str = "image/jpeg") -> str:
    """Encode the bytes of a file as a `data:` URI."""
    return f"data:{form};base64,{base64.b64encode(data).decode()}"
