"""Which pictures and clips a row of any known form names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
class Named:
    """One medium of a row: its kind, its path, or its bytes where the row holds them."""

    kind: str  # "image" or "video"
    path: str
    data: bytes = b""


def media_of(columns: Mapping[str, Any]) -> Iterator[Named]:
    """List the media that a row names: in its columns, and inside the parts of its messages."""
    for names, kind in ((PICTURES, "image"), (CLIPS, "video")):
        for name in names:
            yield from named(columns.get(name), kind)
    for name in EITHER:
        for kind, endings in ENDINGS.items():
            yield from (one for one in named(columns.get(name), kind) if one.path.lower().endswith(endings))
    for name in MESSAGES:
        yield from _inside(columns.get(name))


def named(value: Any, kind: str) -> Iterator[Named]:
    """List what a column names: paths, bytes, mappings of either as `datasets` keeps them, or lists of
    these."""
    match value:
        case str() if value:
            yield Named(kind, value)
        case bytes():
            yield Named(kind, "", value)
        case {"bytes": bytes(data), **rest}:
            yield Named(kind, rest.get("path") or "", data)
        case {"path": str(path)} | {"image": str(path)} | {"video": str(path)}:
            yield Named(kind, path)
        case [*values]:
            for one in values:
                yield from named(one, kind)


def _inside(value: Any) -> Iterator[Named]:
    match value:
        case {"type": "image" | "video" as kind, **rest} if rest.get(kind) is not None:
            yield from named(rest[kind], kind)
        case Mapping():
            yield from _inside(value.get("content"))
        case [*values]:
            for one in values:
                yield from _inside(one)
