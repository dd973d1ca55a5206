"""Media of a dataset: references in rows, and lazy, cached loading from one folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmrl.core.byte_lru import ByteLRU
from mmrl.core.modalities import MODALITIES, media_columns, tensor_bytes
from mmrl.core.types import Frames, Media, Readable
from mmrl.data.fields import RowError, short
from mmrl.data.media import MediaError, held_or_named, locate, read_image
from mmrl.data.messages import ReadMedia, plain_part
from mmrl.data.stored_bytes import byte_file
from mmrl.data.video import FrameSampling, sampled_size

CACHE_BYTES = 1 << 30


@dataclass(eq=False)
class MediaRoot:
    """The folder of a dataset's media. Media paths are relative to it and cannot leave it.

    `cache_bytes` limits the cache of decoded media. The least recently used media are evicted first; the
    latest medium always stays.
    """

    root: Path
    cache_bytes: int = CACHE_BYTES

    def __post_init__(self) -> None:
        self._decoded: ByteLRU[Any] = ByteLRU(self.cache_bytes, tensor_bytes)

    @classmethod
    def of_rows(cls, source: Path, root: str, cache_bytes: int = CACHE_BYTES) -> MediaRoot:
        """Create a media root at `root`, by default at `source` or, if that is a file, at its folder."""
        return cls(Path(root) if root else source if source.is_dir() else source.parent, cache_bytes)

    def medium(self, ref: MediaRef, place: str, sampling: FrameSampling) -> Media:
        """Return the lazily decoded medium of a reference in a row; `place` names the row in errors."""
        if not ref.data:
            self.locate(ref.path)  # report a missing file now, not in a later training step
            return self.file(ref.kind, ref.path, sampling)
        if not MODALITIES[ref.kind].in_rows:
            raise MediaError(f"a {ref.kind} inside a row cannot be read; write it to a file and name that")
        name = ref.path or f"the {ref.kind} of {place}"
        stored = byte_file().put(ref.data)
        return Media(ref.kind, name, StoredMedium(ref.kind, stored, name), stored)

    def reader(self, row: str, sampling: FrameSampling) -> ReadMedia:
        """Create the function that reads media in a row's messages; `row` names the row in errors."""

        def read(kind: str, value: Any, place: str) -> Media:
            refs = list(media_refs(value, kind, place))
            if len(refs) != 1:
                raise RowError(f"wanted one {kind} as `{place}`, got {short(value)}")
            return self.medium(refs[0], row, sampling)

        return read

    def file(self, kind: str, name: str, sampling: FrameSampling | None = None) -> Media:
        """Return a file of the root as a medium that is decoded at its first use."""
        return Media(kind, name, MediaFile(self, kind, name, sampling), self.root / name)

    def video(self, name: str, sampling: FrameSampling) -> Media:
        """Return a video that is decoded at its first use."""
        return self.file("video", name, sampling)

    def image(self, name: str, *, must_exist: bool = False) -> Media:
        """Return an image that is decoded at its first use; with `must_exist` a missing file raises now."""
        if must_exist:
            self.locate(name)
        return self.file("image", name)

    def locate(self, name: str) -> Path:
        """Resolve a path inside the root; raise `MediaError` for paths outside and for files too large."""
        return locate(name, self.root)

    def decoded(self, kind: str, name: str, sampling: FrameSampling | None) -> Any:
        """Decode a file, or return its cached result."""
        path = self.locate(name)
        # The modification time is part of the key, so that a replaced file is decoded again.
        key = (kind, name, sampling, path.stat().st_mtime_ns)
        return self._decoded.get(key, lambda: MODALITIES[kind].load(path, str(path), sampling))


# `Media.load` is a `MediaFile` or a `StoredMedium`. These compare by value, so that caches keyed by a medium
# still work after its prompt was rebuilt from its row.


@dataclass(frozen=True)
class MediaFile:
    """Loads a media file inside a media root."""

    root: MediaRoot
    kind: str
    name: str
    sampling: FrameSampling | None = None

    def __call__(self) -> Any:
        return self.root.decoded(self.kind, self.name, self.sampling)

    def video_size(self) -> tuple[int, int, int, float]:
        """Return number of frames, height, width and seconds of a video without decoding it."""
        return sampled_size(self.root.locate(self.name), self.sampling or FrameSampling())


@dataclass(frozen=True)
class StoredMedium:
    """Loads a medium whose bytes were inside a row."""

    kind: str
    data: Readable
    name: str

    def __call__(self) -> Any:
        return MODALITIES[self.kind].load(self.data.read(), self.name)


def decode_image(source: Path | bytes, name: str, sampling: FrameSampling | None = None) -> Frames:
    """Decode a file or bytes as one RGB frame (see `mmrl.data.media.read_image`); `name` is for errors."""
    return one_frame(read_image(source, name))


def one_frame(image: Any) -> Frames:
    """Convert an RGB image of PIL to one frame at 0 seconds."""
    import numpy

    pixels = torch.from_numpy(numpy.array(image))  # (height, width, 3)
    return Frames(pixels.permute(2, 0, 1)[None].contiguous(), torch.zeros(1, dtype=torch.float64))


# ---- references to media in rows, in all known layouts

# Columns with media in some datasets and texts in others. A text is a medium if it names a media file.
EITHER = ("chosen", "rejected", "mask", "masks", "foreground", "background", "composite")
MESSAGES = ("messages", "prompt", "conversations", "chosen", "rejected", "answers")


@dataclass(frozen=True)
class MediaRef:
    """A reference in a row to a medium: the path of the medium, or its bytes if the row contains them."""

    kind: str  # a key of `MODALITIES`
    path: str
    data: bytes = b""


def media_of(columns: Mapping[str, Any]) -> Iterator[MediaRef]:
    """List the media of a row, from its columns and the parts of its messages.

    Null and missing columns are skipped; raises `RowError` for a column of unknown layout.
    """
    for name, kind in media_columns().items():
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
            case {**fields}:  # as `datasets.Image` stores it: `path` or `bytes` may be null
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
            case _ if (medium := MODALITIES[kind].from_value(item, place)) and type(medium.source) is bytes:
                yield MediaRef(kind, "", medium.source)  # e.g. an array
            case _:
                raise RowError(
                    f"wanted a path, bytes, or an object with `path` or `bytes` of the {kind} as `{place}`, "
                    f"got {short(item)}"
                )


def _file_names(value: Any) -> Iterator[MediaRef]:
    """List the media that a field names by path; a text with the suffix of a media file is a path."""
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
    for kind, modality in MODALITIES.items():
        if path.lower().endswith(modality.endings):
            yield MediaRef(kind, path, data)


def _in_messages(value: Any, name: str) -> Iterator[MediaRef]:
    value = plain_part(value)
    match value:
        case {"type": str(kind)} if kind.startswith(tuple(MODALITIES)):
            keys = [key for key, item in value.items() if key not in ("type", "text") and item is not None]
            if kind in MODALITIES and kind in keys:
                yield from media_refs(value[kind], kind, f"{name}.{kind}")
            elif keys or kind not in MODALITIES:  # a part with only a type is a placeholder
                kinds = " or ".join(f"`{modality}`" for modality in MODALITIES)
                raise RowError(f"wanted {kinds} in a part of `{name}`, got {short(value)}")
        case Mapping():
            yield from _in_messages(value.get("content"), name)
        case [*values]:
            for item in values:
                yield from _in_messages(item, name)
