"""Picture files to tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmrl.data.media import MAX_IMAGE_PIXELS, read_image


@dataclass(frozen=True)
class Reading:
    """How picture files are read: the most pixels a file may have, and the height and width it is brought to
    (0: its own)."""

    max_pixels: int = MAX_IMAGE_PIXELS
    height: int = 0
    width: int = 0


def read_picture(path: Path, reading: Reading) -> Tensor:
    """Decode an image into (3, height, width) uint8, as `mmrl.data.media.read_image` says, cut and
    resized."""
    import numpy
    from PIL import Image, ImageOps

    upright = read_image(path, str(path), reading.max_pixels)
    if reading.height and upright.size != (reading.width, reading.height):
        size = (reading.width, reading.height)
        upright = ImageOps.fit(upright, size, method=Image.Resampling.BICUBIC)
    return torch.from_numpy(numpy.array(upright)).permute(2, 0, 1).contiguous()
