"""Picture files to tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmrl.rows import RowError

MAX_PIXELS = 100_000_000


@dataclass(frozen=True)
class Reading:
    """How picture files are read: the most pixels a file may have, and the height and width it is brought to
    (0: its own)."""

    max_pixels: int = MAX_PIXELS
    height: int = 0
    width: int = 0


def read_picture(path: Path, reading: Reading) -> Tensor:
    """Decode a picture into (3, height, width) uint8, upright; what is transparent becomes white."""
    import numpy
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if image.width * image.height > reading.max_pixels:
                raise RowError(
                    f"'{path}' has {image.width}x{image.height} pixels; the limit is {reading.max_pixels} "
                    "(max_pixels)"
                )
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                white = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(white, upright)
            upright = upright.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise RowError(f"cannot decode '{path}': {error}") from error
    if reading.height and upright.size != (reading.width, reading.height):
        size = (reading.width, reading.height)
        upright = ImageOps.fit(upright, size, method=Image.Resampling.BICUBIC)
    return torch.from_numpy(numpy.array(upright)).permute(2, 0, 1).contiguous()
