"""Reading and writing of images and videos as uint8 tensors, and conversion to Pillow images."""

from __future__ import annotations

from fractions import Fraction
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
    """Decode an image file, or its bytes, to (3, height, width) uint8 in upright orientation.

    With `height` and `width`, the image is cropped around its centre to their aspect ratio, then resized; 0
    keeps its own size. `max_pixels` limits the number of pixels of the file.
    """
    import numpy
    from PIL import Image, ImageOps

    name = "an image inside a row" if isinstance(source, bytes) else str(source)
    image = read_image(source, name, max_pixels)
    if height and image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BICUBIC)
    # Copy (`array`), because a Pillow image's memory is read-only.
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()


def image_size(source: Path | bytes) -> tuple[int, int]:
    """Read height and width of an upright image from its header; (0, 0) if it cannot be read."""
    try:
        width, height = upright_size(source, "an image")
    except MediaError:
        return 0, 0  # `load_image` will raise the error
    return height, width


def load_video(path: Path, num_frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Decode `num_frames` upright frames of a video file, evenly spaced from the first to the last.

    Returns the frames (F, 3, height, width) as uint8, and their times (F,) in seconds.
    """
    with opened_video(path) as container:
        frames = list(container.decode(video=0))
    if len(frames) < num_frames:
        raise MediaError(f"'{path}' has {len(frames)} frames, but {num_frames} are wanted (num_frames)")
    chosen, pixels = [frames[i] for i in linspace_indices(len(frames), num_frames)], []
    for frame in chosen:
        # Scaling precedes rotation: swap height and width of frames that will be rotated by 90 degrees.
        high, wide = (width, height) if is_turned(frame) else (height, width)
        raw = torch.from_numpy(frame.to_ndarray(format="rgb24", width=wide, height=high))
        pixels.append(upright(raw, frame))
    times = torch.tensor([frame.time or 0.0 for frame in chosen])  # `time` is None without time stamps
    return torch.stack(pixels).permute(0, 3, 1, 2).contiguous(), times


def to_pil(image: Tensor) -> Any:
    """Convert an image (3, height, width) uint8 to Pillow."""
    from PIL import Image

    return Image.fromarray(image.cpu().permute(1, 2, 0).contiguous().numpy())


def save_image(image: Tensor, path: Path) -> Path:
    """Write an image (3, height, width) uint8 as PNG; return the path."""
    to_pil(image).save(path, "PNG")
    return path


def save_video(frames: Tensor, path: Path, rate: Fraction) -> Path:
    """Write frames (F, 3, height, width) uint8 as a lossless mp4, `rate` per second; return the path."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=rate, options={"crf": "0", "preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[-2:], "rgb24"
        for frame in frames.cpu().permute(0, 2, 3, 1).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path
