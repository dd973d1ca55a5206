"""Which images and videos a row of any known form names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.data.fields import RowError, short

PICTURES = ("image", "images")
CLIPS = ("video", "videos")
# Columns that hold media in some data sets and words in others: only what is called like a file counts.
EITHER = ("chosen", "rejected", "mask", "masks", "foreground", "background", "composite")
MESSAGES = ("messages", "prompt", "conversations", "chosen", "rejected", "answers")
ENDINGS = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    "video": (".mp4", ".webm", ".mkv", ".avi", ".mov", ".m4v"),
}


@dataclass(frozen=True)
class MediaRef:
    """One medium of a row: its kind, its path, or its bytes where the row holds them."""

    kind: str  # "image" or "video"
    path: str
    data: bytes = b""


def media_of(columns: Mapping[str, Any]) -> Iterator[MediaRef]:
    """List the media that a row names: in its columns, and inside the parts of its messages. A column that is
    null or missing names none; one of an unknown form is a `RowError`."""
    for names, kind in ((PICTURES, "image"), (CLIPS, "video")):
        for name in names:
            yield from media_refs(columns.get(name), kind, name)
    for name in EITHER:
        yield from _files(columns.get(name))
    for name in MESSAGES:
        yield from _inside(columns.get(name), name)


def media_refs(value: Any, kind: str, name: str) -> Iterator[MediaRef]:
    """List what a field `name` names: paths, bytes, mappings of either as `datasets` keeps them, or a list of
    these; null is none."""
    match value:
        case None:
            pass
        case [*values]:
            for i, one in enumerate(values):
                yield _one(one, kind, f"{name}[{i}]")
        case _:
            yield _one(value, kind, name)


def _one(value: Any, kind: str, name: str) -> MediaRef:
    match value:
        case str() if value.strip():
            return MediaRef(kind, value)
        case bytes() if value:
            return MediaRef(kind, "", value)
        case {"bytes": bytes(data), **rest} if data and isinstance(rest.get("path"), str | None):
            return MediaRef(kind, rest.get("path") or "", data)
        case Mapping() if value.get("bytes") is None:
            path = value.get("path", value.get(kind))
            if isinstance(path, str) and path.strip():
                return MediaRef(kind, path)
    raise RowError(
        f"wanted a path, bytes, or an object with `path` or `bytes` of the {kind} as `{name}`, "
        f"got {short(value)}"
    )


def _files(value: Any) -> Iterator[MediaRef]:
    """List what is called like a file, among words."""
    match value:
        case str(path) | {"path": str(path)}:
            data = value.get("bytes") if isinstance(value, Mapping) else b""
            for kind, endings in ENDINGS.items():
                if path.lower().endswith(endings):
                    yield MediaRef(kind, path, data if isinstance(data, bytes) else b"")
        case [*values]:
            for one in values:
                yield from _files(one)


def _inside(value: Any, name: str) -> Iterator[MediaRef]:
    match value:
        case {"type": str(kind)} if kind.startswith(("image", "video")):
            given = [key for key, held in value.items() if key not in ("type", "text") and held is not None]
            if kind in ENDINGS and kind in given:
                yield from media_refs(value[kind], kind, f"{name}.{kind}")
            elif given or kind not in ENDINGS:  # nothing but the type marks where a medium of a column stands
                raise RowError(f"wanted `image` or `video` in a part of `{name}`, got {short(value)}")
        case Mapping():
            yield from _inside(value.get("content"), name)
        case [*values]:
            for one in values:
                yield from _inside(one, name)
