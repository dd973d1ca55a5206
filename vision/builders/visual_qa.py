"""Questions with answers that can be checked, from any data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import builder
from mmrl.data.dataset_io import DataRow
from mmrl.data.fields import RowError, listed, plain, text, uid_of
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter, SplitFiles, readable_rows
from mmrl.vision.media.media_columns import media_refs
from mmrl.vision.media.prompts import answer_of, answers_of

OURS = ("id", "question", "answer", "answers", "choices", "image", "images", "video", "videos")


@builder
class VisualQa:
    """Turn any data set of questions and answers about pictures into rows for `vision.visual_qa`.

    `source` is a file or folder of jsonl, JSON or parquet, a folder that `datasets` saved, or a data set of
    the hub. `columns` maps our names (id, question, answer, answers, choices, image, images, video, videos)
    to those of the source; columns of the same name need no entry, and `keep` names others to take along.
    Media are looked at and copied. Writes `{split}` as jsonl or parquet, and `manifest.json`.
    """

    def __init__(
        self,
        *,
        source: str,
        columns: Mapping[str, str] | None = None,
        keep: tuple[str, ...] = (),
        root: str = "",
        subset: str = "",
        form: Literal["jsonl", "parquet"] = "jsonl",
        bad_rows: Literal["error", "drop"] = "error",
        limit: NonNegativeInt = 0,
    ) -> None:
        unknown = sorted(set(columns or {}) - set(OURS))
        if unknown:
            raise ValueError(f"`columns` maps {unknown}, but rows have only {', '.join(OURS)}")
        self.source, self.columns, self.keep, self.root = source, dict(columns or {}), keep, root
        self.subset, self.form, self.bad_rows, self.limit = subset, form, bad_rows, limit

    def build(self, output: Path) -> dict[str, Any]:
        """Write media and rows, and tell how many of each split."""
        ledger, files = BuildLog(self.bad_rows), SplitFiles(output, f".{self.form}")
        rows, root = readable_rows(self.source, self.root, ledger, self.subset)
        media = MediaWriter(root, output)
        for row in rows:
            try:
                written = self._row(row, media, ledger.kept[row.split])
            except RowError as error:
                ledger.drop(row.place, str(error))
                continue
            files.add(row.split, written)
            ledger.kept[row.split] += 1
            if ledger.kept.total() == self.limit:
                break
        files.close()
        return ledger.finish(output, {"source": self.source, "columns": self.columns})

    def _row(self, row: DataRow, media: MediaWriter, number: int) -> dict[str, Any]:
        given = {name: row.columns.get(self.columns.get(name, name)) for name in OURS}
        try:
            question, answers = text(given["question"], "question"), answers_of(given)
            choices = [] if given["choices"] is None else listed(given["choices"], "choices")
        except RowError as error:
            raise RowError(f"{error}; map it in `columns`") from error
        written: dict[str, Any] = {"id": uid_of(given, f"{row.split}#{number}"), "question": question}
        written |= {"answer": answers} if type(answers) is str else {"answers": list(answers)}
        if choices:
            written["choices"] = [answer_of(one, f"choices[{i}]") for i, one in enumerate(choices)]
        for name, kind in (("image", "image"), ("images", "image"), ("video", "video"), ("videos", "video")):
            paths = [media.put(one) for one in media_refs(given[name], kind, name)]
            if paths:
                written[name] = paths if name.endswith("s") or len(paths) > 1 else paths[0]
        return written | {name: plain(row.columns.get(name), name) for name in self.keep}
