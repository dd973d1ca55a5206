"""Writing datasets: rows, copies of their media, and a manifest of dropped rows."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.core.modalities import MODALITIES
from mmrl.data.dataset_io import FORMS, DataRow, RowError, Rows, SourceError, hub_rows, write_rows
from mmrl.data.media_root import MediaRef, MediaRoot
from mmrl.data.video import FrameSampling

IMAGE_SIGNATURES = {  # first bytes of image files, and their suffix
    b"\x89PNG": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"RIFF": ".webp",  # WAV and AVI files, too; image readers refuse them
    b"BM": ".bmp",
}


@dataclass
class BuildLog:
    """Counts the rows that a builder keeps, and lists the rows that it drops, with the reason."""

    bad_rows: str = "error"  # the alternative is "drop"
    kept: Counter = field(default_factory=Counter)  # number of rows, by split
    dropped: list[str] = field(default_factory=list)

    def drop(self, place: str, reason: str) -> None:
        """Record a dropped row; raises RowError unless `bad_rows` is "drop"."""
        if self.bad_rows == "error":
            raise RowError(f"{place}: {reason}; mend it, or set `bad_rows: drop`")
        self.dropped.append(f"{place}: {reason}")

    @contextmanager
    def dropping(self, place: str) -> Iterator[None]:
        """Drop a row if its conversion inside the context raises a `RowError`."""
        try:
            yield
        except RowError as error:
            self.drop(place, str(error))

    def finish(self, output: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write `manifest.json` with `facts` and row counts; return the counts. Raise if no row is kept."""
        counts: dict[str, Any] = dict(sorted(self.kept.items()))
        if not counts:
            shown = "; ".join(self.dropped[:3]) or "the source is empty"
            source = facts.get("source", output.name)
            raise SourceError(f"no row of {len(self.dropped)} in '{source}' could be used: {shown}")
        manifest = {**facts, "counts": counts, "dropped": self.dropped}
        output.mkdir(parents=True, exist_ok=True)
        (output / "manifest.json").write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        return {**counts, "dropped": len(self.dropped)} if self.dropped else counts


@dataclass
class MediaWriter:
    """Validates media and copies each once into the folder `media/` of a dataset."""

    root: MediaRoot
    output: Path
    folder: str = "media"
    written: dict[MediaRef | str, str] = field(default_factory=dict)

    def put(self, ref: MediaRef) -> str:
        """Copy a referenced file, or write the bytes in a row; return the path relative to the dataset."""
        # Identify bytes by their hash, because many rows may contain the same image.
        key = hashlib.sha256(ref.data).hexdigest() if ref.data else ref
        if key in self.written:
            return self.written[key]
        path = None if ref.data else self.root.locate(ref.path)
        if path:
            MODALITIES[ref.kind].check_file(path)
        else:
            self.root.medium(ref, "the row", FrameSampling()).load()
        if path:
            name = path.relative_to(self.root.root.resolve()).as_posix()  # `path` is resolved
        else:
            name = f"{str(key)[:20]}{image_suffix(ref.data)}"  # 80 bits of the hash
        target = self.output / self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path is None:
            target.write_bytes(ref.data)
        elif target.resolve() != path:  # the output may be the source itself
            shutil.copyfile(path, target)
        self.written[key] = f"{self.folder}/{name}"
        return self.written[key]


def readable_rows(
    source: str, root: str, build_log: BuildLog, subset: str = ""
) -> tuple[Iterator[DataRow], MediaRoot]:
    """Read a file, a folder or a dataset of the hub; return its rows and the root of its media.

    Unreadable rows are dropped with `BuildLog.drop`, or raise RowError if `bad_rows` is "error".
    """
    path = Path(source)
    media = MediaRoot.of_rows(path, root, cache_bytes=0)  # no cache: every file is copied once
    # Any other source is a hub id: `name` or `owner/name`.
    local = path.exists() or path.suffix in FORMS or path.is_absolute() or len(path.parts) > 2

    def readable() -> Iterator[DataRow]:
        for row in Rows(path, media.root) if local else hub_rows(source, subset):
            if row.fault:
                build_log.drop(row.place, row.fault)
            else:
                yield row

    return readable(), media


class SplitFiles:
    """Writes rows to one file per split, as `.jsonl`, `.json` or `.parquet`.

    Until `close`, rows are in `{split}.jsonl.part`, so that an aborted build leaves no complete file.
    """

    def __init__(self, output: Path, form: str = ".jsonl") -> None:
        self.output, self.form = output, form
        output.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, Any] = {}

    def add(self, split: str, row: Mapping[str, Any]) -> None:
        """Write one row to the file of its split."""
        if split not in self._files:
            self._files[split] = (self.output / f"{split}.jsonl.part").open("w", encoding="utf-8")
        self._files[split].write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Complete the files: rename them, or convert them to the file format `form`."""
        for split, file in self._files.items():
            file.close()
            part, path = Path(file.name), self.output / f"{split}{self.form}"
            if self.form == ".jsonl":
                part.replace(path)
            else:
                with part.open(encoding="utf-8") as lines:
                    write_rows(path, map(json.loads, lines))
                part.unlink()


def image_suffix(data: bytes) -> str:
    """Choose the suffix of an image file by its first bytes."""
    return next((suffix for start, suffix in IMAGE_SIGNATURES.items() if data.startswith(start)), ".img")


def is_image_file(path: Path) -> bool:
    """Return whether a path has the suffix of an image format."""
    return path.suffix.lower() in MODALITIES["image"].endings
