"""Sources of unlabelled images: a folder of images, or rows that name them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mmrl.data.dataset_io import Rows, row_files
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
        return islice(self._of_rows() if self.files else self._of_folder(), self.limit or None)

    def content(self) -> str:
        """Hash the files of rows, or the file names of a folder of images.

        The images themselves are compared with their hashes when their pairs are written.
        """
        if self.files:
            return content_of(self.files)
        names = "".join(f"{item.place}\n" for item in self._of_folder())
        return hashlib.sha256(names.encode()).hexdigest()

    def bytes_of(self, ref: MediaRef) -> bytes:
        """Read an image file without decoding it."""
        try:
            return ref.data or self.root.locate(ref.path).read_bytes()
        except OSError as error:
            raise MediaError(f"cannot read '{ref.path}': {error}") from error

    def _of_folder(self) -> Iterator[SourceItem]:
        for folder, subfolders, names in os.walk(self.source):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for path in (Path(folder, name) for name in sorted(names)):
                if is_image_file(path):
                    relative = path.relative_to(self.source).as_posix()
                    yield SourceItem(relative, MediaRef("image", relative))

    def _of_rows(self) -> Iterator[SourceItem]:
        for row in Rows(self.source, self.root.root):
            place = row.place.removeprefix(f"{self.source.parent}{os.sep}")
            try:
                if row.fault:
                    raise RowError(row.fault)
                media = list(media_of(row.columns))
                if [ref.kind for ref in media] != ["image"]:
                    raise RowError(f"wanted one image, got {len(media)} media")
                prompt = row.columns.get("prompt", row.columns.get("question"))
                yield SourceItem(place, media[0], "" if prompt is None else text(prompt, "prompt"))
            except RowError as error:
                yield SourceItem(place, fault=str(error))


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
