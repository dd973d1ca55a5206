"""Reading of images and videos that a user or a program gives, of any usual form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.core.types import Frames, Media
from mmrl.data.fields import RowError, short
from mmrl.data.media import MediaError, as_rgb, held_or_named, is_image, to_image
from mmrl.data.object_rows import as_png
from mmrl.vision.media.media_root import MediaRef, MediaRoot, decode_image
from mmrl.vision.media.video import FrameSampling

LISTED = 2.0  # frames a second of a video that is a list of images


@dataclass(frozen=True)
class MediaReader:
    """Turns what names or is an image or a video into lazily decoded media.

    Args:
        sampling: Which frames of videos are read.
        root: Folder that paths are relative to and may not leave; None for paths that the caller chose.
    """

    sampling: FrameSampling = FrameSampling(max_frames=64)
    root: MediaRoot | None = None

    @classmethod
    def of_data(cls, options: Mapping[str, Any], root: Path | None = None) -> MediaReader:
        """Read videos as a data set with these options does; others of its options do not matter."""
        known = {field.name for field in fields(FrameSampling)}
        sampling = {"max_frames": 64, **{name: value for name, value in options.items() if name in known}}
        return cls(FrameSampling(**sampling), None if root is None else MediaRoot(root))

    def __call__(self, kind: str, value: Any, place: str) -> Media:
        """Make a medium of a path, bytes, or an image in memory: of PIL, an array or a tensor.

        A video may also be a list of images of one size, `LISTED` of which are a second. Raises `RowError`
        for anything else, and for a file that is missing.
        """
        match value:
            case str() | Path() if isinstance(held := held_or_named(str(value)), str):
                return self._file(kind, held, place)
            case str():
                return self(kind, held_or_named(value), place)
            case bytes(data) | {"bytes": bytes(data)}:
                return (self.root or MediaRoot(Path())).medium(MediaRef(kind, "", data), place, self.sampling)
            case {"path": str(path)}:
                return self._file(kind, path, place)
            case [*images] if kind == "video" and images and all(map(is_image, images)):
                frames = film(images)
                return Media("video", place, lambda: frames)
        if kind != "image" or not is_image(value):
            forms = "a path" if kind == "video" else "a path, a PIL image, an array or a tensor"
            raise RowError(f"wanted {forms} as {place}, got {short(value)}")
        data = as_png(value, place)["bytes"]
        return Media("image", place, lambda: decode_image(data, place), data)

    def _file(self, kind: str, path: str, place: str) -> Media:
        root, name = self.root, path
        if root is None:
            chosen = Path(path).expanduser().resolve()  # a link that the caller chose may lead anywhere
            root, name = MediaRoot(chosen.parent), chosen.name
            if not chosen.is_file():
                raise MediaError(f"there is no file '{path}', given as {place}")
        return replace(root.medium(MediaRef(kind, name), place, self.sampling), name=path)


def film(images: Sequence[Any]) -> Frames:
    """Make a video of images in memory of one size, `LISTED` of which are a second."""
    import numpy

    arrays = [numpy.array(as_rgb(to_image(x, f"frame {i}"), f"frame {i}")) for i, x in enumerate(images)]
    if len({array.shape for array in arrays}) > 1:
        raise RowError(f"wanted images of one size as a video, got {len(images)} that differ")
    pixels = torch.stack([torch.from_numpy(array) for array in arrays])
    times = torch.arange(len(images), dtype=torch.float64) / LISTED
    return Frames(pixels.permute(0, 3, 1, 2).contiguous(), times, len(images) / LISTED)
