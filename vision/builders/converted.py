"""Builder that converts data sets between mmrl, verl, ms-swift and LLaMA-Factory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.config.registry import builder
from mmrl.core.modalities import media_columns
from mmrl.data.dataset_io import DataRow, write_rows
from mmrl.data.fields import plain
from mmrl.data.media_root import media_refs
from mmrl.vision.benchmarks.conversions import (
    SUFFIXES,
    Toolkit,
    describe_llama_factory,
    read_row,
    toolkit_of,
    write_row,
)
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter, readable_rows


@builder
@dataclass(kw_only=True)
class Converted:
    """Convert rows between the formats of mmrl, verl, ms-swift and LLaMA-Factory.

    The file types are parquet for verl, jsonl for mmrl and ms-swift, JSON for LLaMA-Factory. Media files are
    validated and copied, and paths become relative to the output folder. For verl, images are stored in the
    rows. For LLaMA-Factory, a `dataset_info.json` is written.

    Args:
        source: A file or folder of rows.
        source_form: Toolkit of the source: `mmrl`, `verl`, `ms_swift` or `llama_factory`, in any spelling
            (`ms-swift`, `LLaMA-Factory`). Rows of LLaVA and ShareGPT have the format `llama_factory`.
        form: Toolkit of the output, one of the same names.
        root: Folder of the media; by default the folder of the rows.
        bad_rows: Rows that cannot be converted. `error`: raise an error. `drop`: list them in the manifest.
    """

    source: str
    source_form: str
    form: str = "mmrl"
    root: str = ""
    bad_rows: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        self.theirs: Toolkit = toolkit_of(self.source_form, "source_form")
        self.ours: Toolkit = toolkit_of(self.form, "form")

    def build(self, output: Path) -> dict[str, Any]:
        """Write media and rows; return the number of rows in each split."""
        log = BuildLog(self.bad_rows)
        rows, root = readable_rows(self.source, self.root, log)
        media = MediaWriter(root, output)
        splits: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            with log.dropping(row.place):
                converted = self._row(row, log.kept[row.split], media)
                splits.setdefault(row.split, []).append(converted)
                log.kept[row.split] += 1
        info = {}
        for split, written in splits.items():
            name = f"{split}{SUFFIXES[self.ours]}"
            write_rows(output / name, written)
            columns = sorted({column for row in written for column in row})  # rows may have different columns
            info[f"{output.name}_{split}"] = describe_llama_factory(columns, name)
        if self.ours == "llama_factory" and info:
            (output / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n")
        return log.finish(output, {"source": Path(self.source).name, "from": self.theirs, "to": self.ours})

    def _row(self, row: DataRow, number: int, media: MediaWriter) -> dict[str, Any]:
        ours = read_row(row.columns, self.theirs)
        for name, kind in media_columns().items():
            if ours.get(name):
                ours[name] = [media.put(medium) for medium in media_refs(ours[name], kind, name)]
        converted = plain(write_row(ours, self.ours), "row")  # before adding bytes, which JSON cannot store
        if self.ours == "verl":
            # `split` and `index` as in the scripts of verl; entries of the row itself take precedence.
            converted["extra_info"] = {"split": row.split, "index": number, **converted["extra_info"]}
            if paths := converted.get("images"):
                converted["images"] = [{"bytes": (media.output / p).read_bytes(), "path": p} for p in paths]
        return converted
