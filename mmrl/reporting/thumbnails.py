"""Small pictures that stand inside a page or a row of parquet."""

from __future__ import annotations

import base64
import io

import torch
from torch import Tensor

from mmrl.core.types import Outcome, Prompt

SIDE = 120  # pixels of what was made; of what was asked about there are several beside each other


def strip(frames: Tensor, *, height: int = 72, most: int = 4) -> bytes:
    """Lay frames (F, 3, h, w) uint8 side by side as one JPEG of `height` pixels: `most` of them, at equal
    distances."""
    from PIL import Image

    places = torch.linspace(0, len(frames) - 1, min(most, len(frames))).round().long().tolist()
    pictures = [Image.fromarray(frames[place].permute(1, 2, 0).contiguous().numpy()) for place in places]
    # A picture of few pixels is enlarged in squares, which is what it is made of.
    way = Image.Resampling.NEAREST if pictures[0].height < height else Image.Resampling.BICUBIC
    width = max(1, round(pictures[0].width * height / pictures[0].height))
    whole = Image.new("RGB", (width * len(pictures) + 2 * (len(pictures) - 1), height), "white")
    for i, picture in enumerate(pictures):
        whole.paste(picture.resize((width, height), way), (i * (width + 2), 0))
    buffer = io.BytesIO()
    whole.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def of_prompt(prompt: Prompt) -> bytes | None:
    """Draw the first medium of a prompt."""
    return strip(prompt.media[0].load().pixels) if prompt.media else None


def of_outcome(outcome: Outcome) -> bytes | None:
    """Draw the picture or video of an outcome, where it is one in 8 bits."""
    seen = outcome.video if outcome.video is not None else outcome.image
    if seen is None or seen.dtype != torch.uint8 or seen.dim() < 3:
        return None
    return strip(seen.cpu() if outcome.video is not None else seen[None].cpu(), height=SIDE)


def source(picture: bytes, form: str = "jpeg") -> str:
    """Write a picture so that it stands inside a page."""
    return f"data:image/{form};base64,{base64.b64encode(picture).decode()}"
