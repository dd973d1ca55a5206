"""Unlabelled pictures, one after the other: a folder of them, or rows that name them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.core.types import Media
from mmrl.data.dataset_io import Rows, parquet_of, row_files
from mmrl.data.fields import RowError, text
from mmrl.vision.media.dataset_writer import IMAGE_SIGNATURES, is_image_file
from mmrl.vision.media.media_columns import MediaRef, media_of
from mmrl.vision.media.media_root import MediaRoot, decode_image
from mmrl.vision.media.video import MediaError


@dataclass(frozen=True)
class Item:
    """One picture to be described, or a row that cannot be used."""

    place: str
    named: MediaRef | None = None
    prompt: str = ""
    fault: str = ""


class Pictures:
    """The pictures of a source in an order that stays; gone through anew each time."""

    def __init__(self, source: str, root: str, limit: int = 0) -> None:
        self.source, self.limit = Path(source), limit
        home = self.source if self.source.is_dir() else self.source.parent
        self.root = MediaRoot(Path(root) if root else home, cache_bytes=0)
        try:
            self.files = row_files(self.source)
        except RowError:
            if not self.source.is_dir():
                raise
            self.files = []

    def __iter__(self) -> Iterator[Item]:
        items = self._rows() if self.files else self._folder()
        for number, item in enumerate(items):
            if self.limit and number == self.limit:
                return
            yield item

    def count(self) -> int:
        """Count the pictures without opening one."""
        count = sum(map(_count_rows, self.files)) if self.files else sum(1 for _ in self._folder())
        return min(count, self.limit or count)

    def content(self) -> str:
        """Hash what stands in the files of rows, or the names in a folder of pictures: each picture in there
        is compared with its own hash when its pair is written."""
        if self.files:
            return content_of(self.files)
        names = "".join(f"{item.place}\n" for item in self._folder())
        return hashlib.sha256(names.encode()).hexdigest()

    def _folder(self) -> Iterator[Item]:
        for folder, inside, names in os.walk(self.source):
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                if is_image_file(path):
                    relative = path.relative_to(self.source).as_posix()
                    yield Item(relative, MediaRef("image", relative))

    def _rows(self) -> Iterator[Item]:
        for row in Rows(self.source, self.root.root):
            place = row.place.removeprefix(f"{self.source.parent}{os.sep}")
            if row.fault:
                yield Item(place, fault=row.fault)
                continue
            try:
                yield _item(place, row.columns)
            except RowError as error:
                yield Item(place, fault=str(error))

    def bytes_of(self, named: MediaRef) -> bytes:
        """Read a picture as it is stored."""
        if named.data:
            return named.data
        try:
            return self.root.locate(named.path).read_bytes()
        except OSError as error:
            raise MediaError(f"cannot read '{named.path}': {error}") from error


def _item(place: str, columns: Mapping[str, Any]) -> Item:
    shown = list(media_of(columns))
    if len(shown) != 1 or shown[0].kind != "image":
        raise RowError(f"wanted one image, got {len(shown)} media")
    asked = columns.get("prompt", columns.get("question"))
    return Item(place, shown[0], "" if asked is None else text(asked, "prompt"))


def content_of(paths: Iterable[Path]) -> str:
    """Hash files by their names and content (SHA-256), and folders by the files in them."""
    content = hashlib.sha256()
    for path in paths:
        for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if one.is_file():
                with one.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                content.update(f"{one.relative_to(path.parent)} {digest}\n".encode())
    return content.hexdigest()


def as_media(name: str, data: bytes) -> Media:
    """Decode a picture once, now, and name it."""
    frames = decode_image(data, name)
    return Media("image", name, lambda: frames)


def digest_of(data: bytes) -> str:
    """Name the bytes of a picture."""
    return hashlib.sha256(data).hexdigest()[:32]


def ending_of(data: bytes) -> str:
    """Tell the ending of a picture's file from how it begins."""
    return next((ending for sign, ending in IMAGE_SIGNATURES.items() if data.startswith(sign)), ".img")


def _count_rows(path: Path) -> int:
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    if path.suffix == ".parquet":
        with parquet_of(path) as file:
            return file.metadata.num_rows
    return sum(1 for _ in Rows(path, path.parent))
