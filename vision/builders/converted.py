"""Data sets of other toolkits as ours, and ours as theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from mmrl.config.registry import builder
from mmrl.data.dataset_io import DataRow, write_rows
from mmrl.data.fields import RowError, plain
from mmrl.vision.benchmarks.conversions import FORMS, MEDIA, describe_llama_factory
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter, readable_rows
from mmrl.vision.media.media_columns import media_refs

Name = Literal["mmrl", "verl", "ms_swift", "llama_factory"]


@builder
class Converted:
    """Turn rows of verl (parquet), ms-swift (jsonl) or LLaMA-Factory (JSON) into ours or into each other's.

    `source` is a file or folder of such rows; media are found under `root` (by default its folder), looked
    at, and copied, so that paths are relative to the output; verl's go into its rows. For LLaMA-Factory a
    `dataset_info.json` is written. Rows that cannot be converted are errors, or with `bad_rows: drop` named
    in the manifest.
    """

    def __init__(
        self,
        *,
        source: str,
        source_form: Name,
        form: Name = "mmrl",
        root: str = "",
        bad_rows: Literal["error", "drop"] = "error",
    ) -> None:
        self.source, self.source_form, self.form = source, source_form, form
        self.root, self.bad_rows = root, bad_rows

    def build(self, output: Path) -> dict[str, Any]:
        """Write media and rows, and tell how many of each split."""
        ledger = BuildLog(self.bad_rows)
        rows, root = readable_rows(self.source, self.root, ledger)
        media = MediaWriter(root, output)
        written: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            try:
                one = self._row(row, ledger.kept[row.split], media)
            except RowError as error:
                ledger.drop(row.place, str(error))
                continue
            written.setdefault(row.split, []).append(one)
            ledger.kept[row.split] += 1
        info = {}
        for split, listed in written.items():
            name = f"{split}{FORMS[self.form].ending}"
            write_rows(output / name, listed)
            columns = sorted({column for one in listed for column in one})
            info[f"{output.name}_{split}"] = describe_llama_factory(columns, name)
        if self.form == "llama_factory" and info:
            (output / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n")
        return ledger.finish(
            output, {"source": Path(self.source).name, "from": self.source_form, "to": self.form}
        )

    def _row(self, row: DataRow, number: int, media: MediaWriter) -> dict[str, Any]:
        ours = FORMS[self.source_form].read(row.columns)
        ours = {key: value for key, value in ours.items() if key not in ("image", "video")}
        for name in MEDIA:
            if ours.get(name):
                ours[name] = [media.put(one) for one in media_refs(ours[name], name[:-1], name)]
        theirs = plain(FORMS[self.form].write(ours), "row")
        if self.form == "verl":
            theirs["extra_info"] = {"split": row.split, "index": number, **theirs["extra_info"]}
            if paths := theirs.get("images"):
                held = [(media.output / path).read_bytes() for path in paths]
                theirs["images"] = [{"bytes": b, "path": p} for b, p in zip(held, paths, strict=True)]
        return theirs
