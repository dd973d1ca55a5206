"""Pictures and clips of a data set: inside one declared folder, within limits, decoded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.kept import Kept
from mmrl.types import Frames, Media
from mmrl.vision.video import MediaError, Sampling, read_video

MAX_FILE_BYTES = 4 << 30
MAX_IMAGE_PIXELS = 100_000_000
CACHE_BYTES = 1 << 30


@dataclass
class MediaRoot:
    """The folder that media paths are relative to, and may not leave. Decoded media are kept while there is
    room."""

    root: Path
    max_file_bytes: int = MAX_FILE_BYTES
    max_image_pixels: int = MAX_IMAGE_PIXELS
    cache_bytes: int = CACHE_BYTES

    def __post_init__(self) -> None:
        self._kept: Kept[Frames] = Kept(self.cache_bytes, lambda frames: frames.pixels.numel())

    def video(self, name: str, sampling: Sampling) -> Media:
        """Name a clip; it is decoded when somebody looks at it."""
        return Media(
            "video", name, lambda: self._once((name, sampling), name, lambda path: read_video(path, sampling))
        )

    def image(self, name: str) -> Media:
        """Name a picture; it is decoded when somebody looks at it."""
        return Media("image", name, lambda: self._once((name,), name, self._read_image))

    def locate(self, name: str) -> Path:
        """Find a file inside the root, or say what is wrong with its name."""
        root = self.root.resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise MediaError(
                f"the media path '{name}' leaves its root '{self.root}'; paths must stay inside it"
            )
        if not path.is_file():
            raise MediaError(f"there is no file '{name}' in '{self.root}'")
        size = path.stat().st_size
        if size > self.max_file_bytes:
            raise MediaError(
                f"'{path}' has {size} bytes; the limit is {self.max_file_bytes} (max_file_bytes)"
            )
        return path

    def _once(self, key: tuple, name: str, read: Callable[[Path], Frames]) -> Frames:
        path = self.locate(name)
        return self._kept.get((*key, path.stat().st_mtime_ns), lambda: read(path))

    def _read_image(self, path: Path) -> Frames:
        return decode_image(path, str(path), self.max_image_pixels)


def decode_image(source: Path | bytes, name: str, max_image_pixels: int = MAX_IMAGE_PIXELS) -> Frames:
    """Decode a picture from a file or from bytes, upright, as one frame; `name` appears in errors."""
    import io

    import numpy
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(source) if type(source) is bytes else source) as image:
            if image.width * image.height > max_image_pixels:
                raise MediaError(
                    f"'{name}' has {image.width}x{image.height} pixels; the limit is "
                    f"{max_image_pixels} (max_image_pixels)"
                )
            array = numpy.array(ImageOps.exif_transpose(image).convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(f"cannot decode '{name}': {error}") from error
    return Frames(
        torch.from_numpy(array).permute(2, 0, 1)[None].contiguous(), torch.zeros(1, dtype=torch.float64)
    )
