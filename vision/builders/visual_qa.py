"""Builder that converts any data set of questions and answers to the format of `vision.visual_qa`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import builder
from mmrl.core.modalities import media_columns
from mmrl.data.dataset_io import DataRow
from mmrl.data.fields import RowError, listed, plain, text, uid_of
from mmrl.data.media_root import media_refs
from mmrl.data.row_fields import ALWAYS, has_content, warn_unread
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter, SplitFiles, readable_rows
from mmrl.vision.media.prompts import answer_of, answers_of

OURS = ("id", "question", "answer", "answers", "choices")  # media columns are added by `media_columns()`


@builder
@dataclass(kw_only=True)
class VisualQa:
    """Convert any data set of questions and answers about media to the format of `vision.visual_qa`.

    Media files are validated and copied. Writes `{split}.jsonl` or `.parquet`, and `manifest.json`.

    Args:
        source: A file or folder of jsonl, JSON or parquet, a folder saved by `datasets`, or the name of a
            data set on the Hugging Face hub.
        columns: Maps the target columns (id, question, answer, answers, choices, image, images, video,
            videos) to columns of the source. Columns with the same name need no entry.
        keep: Other columns to copy. A warning names all dropped columns that have content.
        root: Folder of the media; by default the folder of the rows.
        subset: Configuration name of a data set of the hub.
        form: File format of the output.
        bad_rows: Rows that cannot be used. `error`: raise an error. `drop`: list them in the manifest.
        limit: Maximum number of rows to write; 0: all rows.
    """

    source: str
    columns: Mapping[str, str] | None = None
    keep: tuple[str, ...] = ()
    root: str = ""
    subset: str = ""
    form: Literal["jsonl", "parquet"] = "jsonl"
    bad_rows: Literal["error", "drop"] = "error"
    limit: NonNegativeInt = 0

    def __post_init__(self) -> None:
        self.columns = dict(self.columns or {})
        targets = (*OURS, *media_columns())
        if unknown := sorted(set(self.columns) - set(targets)):
            raise ValueError(f"`columns` maps {unknown}, but rows have only {', '.join(targets)}")

    def build(self, output: Path) -> dict[str, Any]:
        """Write media and rows; return the number of rows in each split."""
        log, files = BuildLog(self.bad_rows), SplitFiles(output, f".{self.form}")
        read = {(self.columns or {}).get(name, name) for name in (*OURS, *media_columns())} | {
            *self.keep,
            *ALWAYS,
        }
        unread: Counter[str] = Counter()
        rows, root = readable_rows(self.source, self.root, log, self.subset)
        media = MediaWriter(root, output)
        for row in rows:
            with log.dropping(row.place):
                files.add(row.split, self._row(row, media, log.kept[row.split]))
                log.kept[row.split] += 1
                unread.update(name for name in row.columns.keys() - read if has_content(row.columns[name]))
                if log.kept.total() == self.limit:  # never equal for limit 0, because a row was just counted
                    break
        files.close()
        warn_unread(unread, self.source, "name those that are needed in `keep`")
        return log.finish(output, {"source": self.source, "columns": self.columns})

    def _row(self, row: DataRow, media: MediaWriter, number: int) -> dict[str, Any]:
        names = (*OURS, *media_columns())
        fields = {name: row.columns.get(self.columns.get(name, name)) for name in names}
        try:
            question, answers = text(fields["question"], "question"), answers_of(fields)
            choices = [] if fields["choices"] is None else listed(fields["choices"], "choices")
        except RowError as error:
            raise RowError(f"{error}; map it in `columns`") from error
        written: dict[str, Any] = {"id": uid_of(fields, f"{row.split}#{number}"), "question": question}
        written["answer" if type(answers) is str else "answers"] = answers
        if choices:
            written["choices"] = [answer_of(choice, f"choices[{i}]") for i, choice in enumerate(choices)]
        for name, kind in media_columns().items():
            paths = [media.put(medium) for medium in media_refs(fields[name], kind, name)]
            if paths:
                # A column named `image` may contain a list of images.
                written[name] = paths if name.endswith("s") or len(paths) > 1 else paths[0]
        return written | {name: plain(row.columns.get(name), name) for name in self.keep}
