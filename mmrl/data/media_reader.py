"""Reading media that a user or a program passes as paths, bytes, or objects in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Frames, Media
from mmrl.data.fields import RowError, short
from mmrl.data.media import MediaError, as_rgb, held_or_named, is_image, to_image
from mmrl.data.media_root import MediaRef, MediaRoot, decode_image
from mmrl.data.object_rows import as_png
from mmrl.data.video import FrameSampling

LISTED = 2.0  # frames per second of a video that is given as a list of images


@dataclass(frozen=True)
class MediaReader:
    """Converts paths, bytes and objects in memory to lazily decoded media.

    Args:
        sampling: Number and size of the frames that are read from videos.
        root: Folder that paths are relative to and cannot leave; None: any path.
    """

    sampling: FrameSampling = FrameSampling(max_frames=64)
    root: MediaRoot | None = None

    @classmethod
    def of_data(cls, options: Mapping[str, Any], root: Path | None = None) -> MediaReader:
        """Create a reader from a data set's options for video sampling; other options are ignored."""
        names = {field.name for field in fields(FrameSampling)}
        sampling = {"max_frames": 64, **{name: value for name, value in options.items() if name in names}}
        return cls(FrameSampling(**sampling), None if root is None else MediaRoot(root))

    def __call__(self, kind: str, value: Any, place: str) -> Media:
        """Make a medium from a path, from bytes, or from an object in memory (`Modality.from_value`).

        Raises `RowError` for other objects and for missing files.
        """
        match value:
            case str() | Path():
                named = held_or_named(str(value))
                return self._file(kind, named, place) if isinstance(named, str) else self(kind, named, place)
            case bytes(data) | {"bytes": bytes(data)}:
                return (self.root or MediaRoot(Path())).medium(MediaRef(kind, "", data), place, self.sampling)
            case {"path": str(path)}:
                return self._file(kind, path, place)
        if medium := MODALITIES[kind].from_value(value, place):
            return medium
        raise RowError(f"wanted {MODALITIES[kind].forms} as {place}, got {short(value)}")

    def _file(self, kind: str, path: str, place: str) -> Media:
        root, name = self.root, path
        if root is None:
            chosen = Path(path).expanduser().resolve()  # the caller's own links are trusted
            root, name = MediaRoot(chosen.parent), chosen.name
            if not chosen.is_file():
                raise MediaError(f"there is no file '{path}', given as {place}")
        return replace(root.medium(MediaRef(kind, name), place, self.sampling), name=path)


def image_in_memory(value: Any, place: str) -> Media | None:
    """Convert a PIL image, an array or a tensor to a medium; None for other objects."""
    if not is_image(value):
        return None
    data = as_png(value, place)["bytes"]
    return Media("image", place, lambda: decode_image(data, place), data)


def video_in_memory(value: Any, place: str) -> Media | None:
    """Convert a list of images of equal size to a video (`LISTED` frames per second); None for others."""
    if not isinstance(value, list | tuple) or not value or not all(map(is_image, value)):
        return None
    frames = film(value)
    return Media("video", place, lambda: frames)


def film(images: Sequence[Any]) -> Frames:
    """Make a video from images of equal size, with `LISTED` frames per second."""
    import numpy

    arrays = [numpy.array(as_rgb(to_image(x, f"frame {i}"), f"frame {i}")) for i, x in enumerate(images)]
    if len({array.shape for array in arrays}) > 1:
        raise RowError(f"wanted images of one size as a video, got {len(images)} that differ")
    pixels = torch.stack([torch.from_numpy(array) for array in arrays])
    times = torch.arange(len(images), dtype=torch.float64) / LISTED
    return Frames(pixels.permute(0, 3, 1, 2).contiguous(), times, len(images) / LISTED)
