"""Image and video files as uint8 tensors, and tensors as Pillow images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.tensor import linspace_indices
from mmrl.data.media import (
    MAX_IMAGE_PIXELS,
    MediaError,
    is_turned,
    opened_video,
    read_image,
    upright,
    upright_size,
)


def load_image(
    source: Path | bytes, height: int = 0, width: int = 0, max_pixels: int = MAX_IMAGE_PIXELS
) -> Tensor:
    """Decode an image file, or its bytes, into (3, height, width) uint8, upright.

    With `height` and `width` it is cropped around its centre to that aspect ratio, then resized; 0 keeps its
    own size. `max_pixels` is the most pixels that the file may have.
    """
    import numpy
    from PIL import Image, ImageOps

    name = "an image inside a row" if isinstance(source, bytes) else str(source)
    image = read_image(source, name, max_pixels)
    if height and image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BICUBIC)
    # `array` copies; the memory of a Pillow image is read-only.
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


def image_size(source: Path | bytes) -> tuple[int, int]:
    """Read height and width of an image, upright, from its header; (0, 0) where there is none."""
    try:
        width, height = upright_size(source, "an image")
    except MediaError:
        return 0, 0  # `load_image` says why
    return height, width


def load_video(path: Path, num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Decode `num_frames` frames of a video file, evenly spread from its first to its last, upright.

    Gives the frames (F, 3, height, width) uint8 and their (F,) seconds.
    """
    with opened_video(path) as container:
        frames = list(container.decode(video=0))
    if len(frames) < num_frames:
        raise MediaError(f"'{path}' has {len(frames)} frames, but {num_frames} are wanted (num_frames)")
    chosen, pixels = [frames[i] for i in linspace_indices(len(frames), num_frames)], []
    for frame in chosen:
        # The display matrix is applied after scaling, so a frame shown turned swaps its sides first.
        high, wide = (width, height) if is_turned(frame) else (height, width)
        raw = torch.from_numpy(frame.to_ndarray(format="rgb24", width=wide, height=high))
        pixels.append(upright(raw, frame))
    times = torch.tensor([frame.time or 0.0 for frame in chosen])  # None without time stamps
    return torch.stack(pixels).permute(0, 3, 1, 2).contiguous(), times


def to_pil(image: Tensor) -> Any:
    """Convert an image (3, height, width) uint8 to Pillow."""
    from PIL import Image

    return Image.fromarray(image.cpu().permute(1, 2, 0).contiguous().numpy())
