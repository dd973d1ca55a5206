"""Lazy loading of the images and videos of a dataset, from one folder, with a cache of decoded media."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.core.byte_lru import ByteLRU
from mmrl.core.types import Frames, Media
from mmrl.data.media import MAX_FILE_BYTES, MAX_IMAGE_PIXELS, locate, read_image
from mmrl.vision.media.video import FrameSampling, read_video

CACHE_BYTES = 1 << 30


@dataclass
class MediaRoot:
    """The folder that the media paths of a dataset are relative to and may not leave.

    Args:
        root: The folder.
        max_file_bytes: The largest file that is opened.
        max_image_pixels: The most pixels (width x height) of an image.
        cache_bytes: Size of the cache of decoded media, least recently used first out; the latest stays.
    """

    root: Path
    max_file_bytes: int = MAX_FILE_BYTES
    max_image_pixels: int = MAX_IMAGE_PIXELS
    cache_bytes: int = CACHE_BYTES

    def __post_init__(self) -> None:
        self._kept: ByteLRU[Frames] = ByteLRU(self.cache_bytes, lambda frames: frames.pixels.numel())

    def video(self, name: str, sampling: FrameSampling) -> Media:
        """Make a video that is decoded when its frames are first needed."""
        return self._lazy("video", name, (name, sampling), lambda path: read_video(path, sampling))

    def image(self, name: str) -> Media:
        """Make an image that is decoded when its pixels are first needed."""
        return self._lazy(
            "image", name, (name,), lambda path: decode_image(path, str(path), self.max_image_pixels)
        )

    def locate(self, name: str) -> Path:
        """Resolve a path inside the root; raises `MediaError` for other paths and for files too large."""
        return locate(name, self.root, self.max_file_bytes)

    def _lazy(self, kind: str, name: str, key: tuple, read: Callable[[Path], Frames]) -> Media:
        def load() -> Frames:
            path = self.locate(name)
            # The time of change is part of the key, so that a file that was replaced is decoded anew.
            return self._kept.get((*key, path.stat().st_mtime_ns), lambda: read(path))

        return Media(kind, name, load, self.root / name)


def decode_image(source: Path | bytes, name: str, max_image_pixels: int = MAX_IMAGE_PIXELS) -> Frames:
    """Decode a file or bytes as one RGB frame (see `mmrl.data.media.read_image`); `name` is for errors."""
    import numpy

    array = numpy.array(read_image(source, name, max_image_pixels))
    return Frames(
        torch.from_numpy(array).permute(2, 0, 1)[None].contiguous(), torch.zeros(1, dtype=torch.float64)
    )
