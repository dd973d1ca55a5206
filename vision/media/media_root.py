"""Pictures and clips of a data set: inside one declared folder, within limits, decoded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.core.byte_lru import Kept
from mmrl.core.types import Frames, Media
from mmrl.data.media import MAX_IMAGE_PIXELS, MediaError, locate, read_image
from mmrl.vision.media.video import FrameSampling, read_video

MAX_FILE_BYTES = 4 << 30
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

    def video(self, name: str, sampling: FrameSampling) -> Media:
        """Name a clip; it is decoded when somebody looks at it."""
        return Media(
            "video",
            name,
            lambda: self._once((name, sampling), name, lambda path: read_video(path, sampling)),
            self.root / name,
        )

    def image(self, name: str) -> Media:
        """Name a picture; it is decoded when somebody looks at it."""
        return Media("image", name, lambda: self._once((name,), name, self._read_image), self.root / name)

    def locate(self, name: str) -> Path:
        """Find a file inside the root, or say what is wrong with its name."""
        path = locate(name, self.root)
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
    """Decode an image from a file or from bytes as one frame, as `mmrl.data.media.read_image` says; `name`
    appears in errors."""
    import numpy

    array = numpy.array(read_image(source, name, max_image_pixels))
    return Frames(
        torch.from_numpy(array).permute(2, 0, 1)[None].contiguous(), torch.zeros(1, dtype=torch.float64)
    )
