"""Writing data sets: rows with relative media paths, their media beside them, and a manifest of what was left
out."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.data.dataset_io import FORMS, DataRow, RowError, Rows, SourceError, hub_rows
from mmrl.vision.media.media_columns import ENDINGS, MediaRef
from mmrl.vision.media.media_root import MediaRoot, decode_image
from mmrl.vision.media.video import MediaError, video_duration

IMAGE_SIGNATURES = {
    b"\x89PNG": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"RIFF": ".webp",
    b"BM": ".bmp",
}


@dataclass
class BuildLog:
    """What a builder kept and left out, and why; every row that is left out is named."""

    bad_rows: str = "error"  # or "drop"
    kept: Counter = field(default_factory=Counter)
    dropped: list[str] = field(default_factory=list)

    def drop(self, place: str, reason: str) -> None:
        """Leave a row out, or stop if none may be."""
        if self.bad_rows == "error":
            raise RowError(f"{place}: {reason}; mend it, or set `bad_rows: drop`")
        self.dropped.append(f"{place}: {reason}")

    def finish(self, output: Path, told: Mapping[str, Any]) -> dict[str, Any]:
        """Write `manifest.json`, and give the counts of the closing line."""
        counts: dict[str, Any] = dict(sorted(self.kept.items()))
        if not counts:
            shown = "; ".join(self.dropped[:3]) or "the source is empty"
            source = told.get("source", output.name)
            raise SourceError(f"no row of {len(self.dropped)} in '{source}' could be used: {shown}")
        manifest = {**told, "counts": counts, "dropped": self.dropped}
        output.mkdir(parents=True, exist_ok=True)
        (output / "manifest.json").write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        return {**counts, "dropped": len(self.dropped)} if self.dropped else counts


@dataclass
class MediaWriter:
    """Puts media into a data set under `media/`, once each, after looking at them."""

    root: MediaRoot
    output: Path
    folder: str = "media"
    written: dict[MediaRef | str, str] = field(default_factory=dict)

    def put(self, named: MediaRef) -> str:
        """Copy or write one medium, and give its path relative to the data set."""
        key = hashlib.sha256(named.data).hexdigest() if named.data else named
        if key not in self.written:
            self.written[key] = self._encoded(named, str(key)) if named.data else self._copied(named)
        return self.written[key]

    def _encoded(self, named: MediaRef, digest: str) -> str:
        if named.kind != "image":
            raise MediaError("a clip inside a row cannot be read; write it to a file and name that")
        decode_image(named.data, named.path or "the picture in the row")
        ending = next((e for sign, e in IMAGE_SIGNATURES.items() if named.data.startswith(sign)), ".img")
        name = f"{self.folder}/{digest[:20]}{ending}"
        self._place(name).write_bytes(named.data)
        return name

    def _copied(self, named: MediaRef) -> str:
        path = self.root.locate(named.path)
        if named.kind == "image":
            decode_image(path, str(path))
        else:
            video_duration(path)
        name = f"{self.folder}/{path.relative_to(self.root.root.resolve()).as_posix()}"
        target = self._place(name)
        if target.resolve() != path:
            shutil.copyfile(path, target)
        return name

    def _place(self, name: str) -> Path:
        target = self.output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def readable_rows(
    source: str, root: str, ledger: BuildLog, subset: str = ""
) -> tuple[Iterator[DataRow], MediaRoot]:
    """Go through the rows of a file, a folder or a data set of the hub; those that cannot be read are left
    out."""
    path = Path(source)
    home = Path(root) if root else path if path.is_dir() else path.parent
    here = path.exists() or path.suffix in FORMS or path.is_absolute() or len(path.parts) > 2
    found: Iterable[DataRow] = Rows(path, home) if here else hub_rows(source, subset)

    def sound() -> Iterator[DataRow]:
        for row in found:
            if row.fault:
                ledger.drop(row.place, row.fault)
            else:
                yield row

    return sound(), MediaRoot(home, cache_bytes=0)


class SplitFiles:
    """Writes rows to one file per split as they come: `{split}.jsonl`, or in the end `.json` or
    `.parquet`."""

    def __init__(self, output: Path, form: str = ".jsonl") -> None:
        self.output, self.form = output, form
        output.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, Any] = {}

    def add(self, split: str, row: Mapping[str, Any]) -> None:
        """Write one row."""
        if split not in self._files:
            self._files[split] = (self.output / f"{split}.jsonl.part").open("w", encoding="utf-8")
        self._files[split].write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Finish the files; until then they end in `.part`."""
        from mmrl.data.dataset_io import write_rows

        for split, file in self._files.items():
            file.close()
            part = self.output / f"{split}.jsonl.part"
            if self.form == ".jsonl":
                part.replace(self.output / f"{split}.jsonl")
                continue
            with part.open(encoding="utf-8") as lines:
                write_rows(self.output / f"{split}{self.form}", map(json.loads, lines))
            part.unlink()


def is_image_file(path: Path) -> bool:
    """Tell a picture by its name."""
    return path.suffix.lower() in ENDINGS["image"]
