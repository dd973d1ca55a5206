"""Lazy loading of the images and videos of a dataset, from one folder, with a cache of decoded media."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmrl.core.byte_lru import ByteLRU
from mmrl.core.types import Frames, Media, Readable
from mmrl.data.fields import RowError, short
from mmrl.data.media import MediaError, held_or_named, locate, read_image
from mmrl.data.messages import ReadMedia, plain_part
from mmrl.data.stored_bytes import byte_file
from mmrl.vision.media.video import FrameSampling, read_video, sampled_size

CACHE_BYTES = 1 << 30


@dataclass(eq=False)
class MediaRoot:
    """The folder that the media paths of a dataset are relative to and may not leave.

    `cache_bytes` limits the cache of decoded media, least recently used first out; the latest stays.
    """

    root: Path
    cache_bytes: int = CACHE_BYTES

    def __post_init__(self) -> None:
        # A frame takes a byte per element: its pixels are uint8.
        self._decoded: ByteLRU[Frames] = ByteLRU(self.cache_bytes, lambda frames: frames.pixels.numel())

    @classmethod
    def of_rows(cls, source: Path, root: str, cache_bytes: int = CACHE_BYTES) -> MediaRoot:
        """Return the folder `root`, or by default that of a file or folder of rows."""
        return cls(Path(root) if root else source if source.is_dir() else source.parent, cache_bytes)

    def medium(self, ref: MediaRef, place: str, sampling: FrameSampling) -> Media:
        """Return the lazily decoded medium of a reference in a row; `place` names the row in errors."""
        if not ref.data:
            self.locate(ref.path)  # a missing file is an error of this row, not of a later step of training
            return self.image(ref.path) if ref.kind == "image" else self.video(ref.path, sampling)
        if ref.kind == "video":
            raise MediaError("a video inside a row cannot be read; write it to a file and name that")
        name = ref.path or f"the image of {place}"
        stored = byte_file().put(ref.data)
        return Media("image", name, StoredImage(stored, name), stored)

    def reader(self, row: str, sampling: FrameSampling) -> ReadMedia:
        """Make the function that reads the media inside the messages of a row; `row` names it in errors."""

        def read(kind: str, value: Any, place: str) -> Media:
            refs = list(media_refs(value, kind, place))
            if len(refs) != 1:
                raise RowError(f"wanted one {kind} as `{place}`, got {short(value)}")
            return self.medium(refs[0], row, sampling)

        return read

    def video(self, name: str, sampling: FrameSampling) -> Media:
        """Make a video that is decoded when its frames are first needed."""
        return Media("video", name, MediaFile(self, name, sampling), self.root / name)

    def image(self, name: str, *, must_exist: bool = False) -> Media:
        """Make an image that is decoded when its pixels are first needed; `must_exist` looks for it now."""
        if must_exist:
            self.locate(name)
        return Media("image", name, MediaFile(self, name), self.root / name)

    def locate(self, name: str) -> Path:
        """Resolve a path inside the root; raises `MediaError` for other paths and for files too large."""
        return locate(name, self.root)

    def decoded(self, name: str, sampling: FrameSampling | None) -> Frames:
        """Decode an image, or with `sampling` a video, or take it from the cache."""
        path = self.locate(name)

        def read() -> Frames:
            return read_video(path, sampling) if sampling else decode_image(path, str(path))

        # The time of change is part of the key, so that a file that was replaced is decoded anew.
        return self._decoded.get((name, sampling, path.stat().st_mtime_ns), read)


# What `Media.load` is: objects that are equal for the same medium, so that a prompt which is made again from
# its row finds what was computed of its media.


@dataclass(frozen=True)
class MediaFile:
    """Loads an image of a root, or with `sampling` a video."""

    root: MediaRoot
    name: str
    sampling: FrameSampling | None = None

    def __call__(self) -> Frames:
        return self.root.decoded(self.name, self.sampling)

    def video_size(self) -> tuple[int, int, int, float]:
        """Find the number of frames of a video, their height and width, and its seconds, undecoded."""
        assert self.sampling is not None, "an image"
        return sampled_size(self.root.locate(self.name), self.sampling)


@dataclass(frozen=True)
class StoredImage:
    """Loads an image that a row contained."""

    data: Readable
    name: str

    def __call__(self) -> Frames:
        return decode_image(self.data.read(), self.name)


def decode_image(source: Path | bytes, name: str) -> Frames:
    """Decode a file or bytes as one RGB frame (see `mmrl.data.media.read_image`); `name` is for errors."""
    return one_frame(read_image(source, name))


def one_frame(image: Any) -> Frames:
    """Make the frame of an RGB image of Pillow: (1, 3, height, width) uint8 at 0 s."""
    import numpy

    pixels = torch.from_numpy(numpy.array(image))
    return Frames(pixels.permute(2, 0, 1)[None].contiguous(), torch.zeros(1, dtype=torch.float64))


# ---- finding the images and videos that a row of a dataset refers to, in all known layouts

COLUMNS = {"image": "image", "images": "image", "video": "video", "videos": "video"}
# Columns that hold media in some datasets and texts in others: only names of media files count.
EITHER = ("chosen", "rejected", "mask", "masks", "foreground", "background", "composite")
MESSAGES = ("messages", "prompt", "conversations", "chosen", "rejected", "answers")
ENDINGS = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    "video": (".mp4", ".webm", ".mkv", ".avi", ".mov", ".m4v"),
}


@dataclass(frozen=True)
class MediaRef:
    """A reference of a row to an image or video: its path, or its bytes if the row contains them."""

    kind: str  # "image" or "video"
    path: str
    data: bytes = b""


def media_of(columns: Mapping[str, Any]) -> Iterator[MediaRef]:
    """List the media that a row refers to, in its columns and in the parts of its messages.

    Columns that are null or missing are skipped; raises `RowError` for a column of unknown layout.
    """
    for name, kind in COLUMNS.items():
        yield from media_refs(columns.get(name), kind, name)
    for name in EITHER:
        yield from _file_names(columns.get(name))
    for name in MESSAGES:
        yield from _in_messages(columns.get(name), name)


def media_refs(value: Any, kind: str, name: str) -> Iterator[MediaRef]:
    """List the media in a field: null, a path, bytes, a mapping of `datasets`, or a list of these."""
    match value:
        case None:
            items = []
        case [*values]:
            items = [(f"{name}[{i}]", item) for i, item in enumerate(values)]
        case _:
            items = [(name, value)]
    for place, item in items:
        match item:
            case bytes():
                path, data = None, item
            case {**fields}:  # `Image` of `datasets` has both keys, of which one may be null
                path, data = fields.get("path", fields.get(kind)), fields.get("bytes")
            case _:
                path, data = item, None
        if isinstance(path, str) and not data:
            held = held_or_named(path)
            path, data = (None, held) if isinstance(held, bytes) else (held, data)
        match path, data:
            case ((str() | None), bytes()) if data:
                yield MediaRef(kind, path or "", data)
            case str(), None if path.strip():
                yield MediaRef(kind, path)
            case _:
                raise RowError(
                    f"wanted a path, bytes, or an object with `path` or `bytes` of the {kind} as `{place}`, "
                    f"got {short(item)}"
                )


def _file_names(value: Any) -> Iterator[MediaRef]:
    """List the texts that are names of media files."""
    data = b""
    match value:
        case {"path": str(path), "bytes": bytes(data)}:
            pass
        case str(path) | {"path": str(path)}:
            pass
        case [*values]:
            for item in values:
                yield from _file_names(item)
            return
        case _:
            return
    for kind, endings in ENDINGS.items():
        if path.lower().endswith(endings):
            yield MediaRef(kind, path, data)


def _in_messages(value: Any, name: str) -> Iterator[MediaRef]:
    value = plain_part(value)
    match value:
        case {"type": str(kind)} if kind.startswith(("image", "video")):
            keys = [key for key, item in value.items() if key not in ("type", "text") and item is not None]
            if kind in ENDINGS and kind in keys:
                yield from media_refs(value[kind], kind, f"{name}.{kind}")
            elif keys or kind not in ENDINGS:  # a part with only a type is a placeholder for a media column
                raise RowError(f"wanted `image` or `video` in a part of `{name}`, got {short(value)}")
        case Mapping():
            yield from _in_messages(value.get("content"), name)
        case [*values]:
            for item in values:
                yield from _in_messages(item, name)
