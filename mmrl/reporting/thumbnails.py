"""Thumbnails of prompts and answers as JPEG, for pages and parquet rows."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.core.tensor import linspace_indices
from mmrl.core.types import Media, Outcome, Prompt
from mmrl.data.media import MediaError

SIDE = 120  # height of an answer's thumbnail in pixels; prompts show several smaller frames in a row
GAP = 2  # pixels between frames
MARK = re.compile(r"<(?:image|video): \d+ tokens>")  # as `vision.with_tools` writes media


def strip(frames: Tensor, *, height: int = 72, most: int = 4) -> bytes:
    """Lay frames, uint8 (F, 3, h, w), side by side as one JPEG of a height in pixels.

    Of more than `most` frames some are shown, at equal distances from the first to the last.
    """
    from PIL import Image

    shown = frames[linspace_indices(len(frames), most)]
    images = [Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in shown]
    # An image of few pixels is enlarged in squares: a smooth enlargement would invent what lies between them.
    resample = Image.Resampling.NEAREST if images[0].height < height else Image.Resampling.BICUBIC
    width = max(1, round(images[0].width * height / images[0].height))
    whole = Image.new("RGB", ((width + GAP) * len(images) - GAP, height), "white")
    for i, image in enumerate(images):
        whole.paste(image.resize((width, height), resample), (i * (width + GAP), 0))
    buffer = io.BytesIO()
    whole.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def of_prompt(prompt: Prompt) -> bytes | None:
    """Make a thumbnail of the first image or video of a prompt; None where there is none to see.

    Where answers are recorded, images may be missing or broken: a model that needs one has raised before.
    """
    try:
        pixels = getattr(prompt.media[0].load(), "pixels", None) if prompt.media else None
        return None if pixels is None else strip(pixels)
    except MediaError:
        return None


def of_outcome(outcome: Outcome) -> bytes | None:
    """Make a thumbnail of the image or video of an outcome; None unless it is one in 8 bits."""
    # (3, h, w) of an image becomes a video of one frame; latents and points are no bytes.
    frames = outcome.image[None] if outcome.image is not None else None
    frames = outcome.video if outcome.video is not None else frames
    shown = frames is not None and frames.dtype == torch.uint8 and frames.dim() == 4
    return strip(frames.cpu(), height=SIDE) if shown else None


def of_tools(shown: Sequence[Media]) -> list[bytes] | None:
    """Make a thumbnail of every image that tools showed in a conversation; None where there is none."""
    return [strip(image.load().pixels, height=SIDE) for image in shown] or None


def illustrated(conversation: str, shown: Sequence[bytes]) -> list[str | bytes]:
    """Cut a conversation where `<image: 64 tokens>` stands, and put thumbnails there: texts and JPEG.

    Where there are more marks or fewer, because a policy may write them, too, the thumbnails come last.
    """
    marks = list(MARK.finditer(conversation))
    if len(marks) != len(shown):
        return [conversation, *shown]
    parts, at = [], 0
    for mark, image in zip(marks, shown, strict=True):
        parts += [conversation[at : mark.start()], image]
        at = mark.end()
    return [part for part in (*parts, conversation[at:]) if part]


def data_uri(image: bytes, form: str = "jpeg") -> str:
    """Encode an image file as a `data:` address, so that a page needs no file beside it."""
    return f"data:image/{form};base64,{base64.b64encode(image).decode()}"
