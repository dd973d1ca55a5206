"""Sources of unlabelled images: a folder of images, or rows that name them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mmrl.data.dataset_io import Rows, parquet_of, row_files
from mmrl.data.fields import RowError, text
from mmrl.vision.media.dataset_writer import is_image_file
from mmrl.vision.media.media_root import MediaRef, MediaRoot, media_of
from mmrl.vision.media.video import MediaError


@dataclass(frozen=True)
class SourceItem:
    """One image of a source with its prompt if the row has one, or a row that cannot be used."""

    place: str
    ref: MediaRef | None = None
    prompt: str = ""
    fault: str = ""


class ImageSource:
    """The images of a folder or of rows, in a stable order; each iteration starts again."""

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

    def __iter__(self) -> Iterator[SourceItem]:
        return islice(self._rows() if self.files else self._folder(), self.limit or None)

    def count(self) -> int:
        """Count the images without opening one."""
        count = sum(map(_count_rows, self.files)) if self.files else sum(1 for _ in self._folder())
        return min(count, self.limit or count)

    def content(self) -> str:
        """Hash the files of rows, or the file names of a folder of images.

        The images themselves are compared with their hashes when their pairs are written.
        """
        if self.files:
            return content_of(self.files)
        names = "".join(f"{item.place}\n" for item in self._folder())
        return hashlib.sha256(names.encode()).hexdigest()

    def bytes_of(self, ref: MediaRef) -> bytes:
        """Read an image file without decoding it."""
        if ref.data:
            return ref.data
        try:
            return self.root.locate(ref.path).read_bytes()
        except OSError as error:
            raise MediaError(f"cannot read '{ref.path}': {error}") from error

    def _folder(self) -> Iterator[SourceItem]:
        for folder, subfolders, names in os.walk(self.source):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                if is_image_file(path):
                    relative = path.relative_to(self.source).as_posix()
                    yield SourceItem(relative, MediaRef("image", relative))

    def _rows(self) -> Iterator[SourceItem]:
        for row in Rows(self.source, self.root.root):
            place = row.place.removeprefix(f"{self.source.parent}{os.sep}")
            try:
                yield SourceItem(place, fault=row.fault) if row.fault else _item(place, row.columns)
            except RowError as error:
                yield SourceItem(place, fault=str(error))


def _item(place: str, columns: Mapping[str, Any]) -> SourceItem:
    media = list(media_of(columns))
    if len(media) != 1 or media[0].kind != "image":
        raise RowError(f"wanted one image, got {len(media)} media")
    prompt = columns.get("prompt", columns.get("question"))
    return SourceItem(place, media[0], "" if prompt is None else text(prompt, "prompt"))


def content_of(paths: Iterable[Path]) -> str:
    """Hash files by names and content (SHA-256), and folders by the files in them."""
    content = hashlib.sha256()
    for path in paths:
        for inner in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if inner.is_file():
                with inner.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                content.update(f"{inner.relative_to(path.parent)} {digest}\n".encode())
    return content.hexdigest()


def digest_of(data: bytes) -> str:
    """Hash the bytes of an image."""
    return hashlib.sha256(data).hexdigest()[:32]


def _count_rows(path: Path) -> int:
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    if path.suffix == ".parquet":
        with parquet_of(path) as file:
            return file.metadata.num_rows
    return sum(1 for _ in Rows(path, path.parent))
