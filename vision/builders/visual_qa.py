"""Questions with answers that can be checked, from any data set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmrl.registry import builder
from mmrl.rows import DataRow, RowError
from mmrl.vision.named_media import Named, named
from mmrl.vision.video import MediaError
from mmrl.vision.writing import Ledger, MediaWriter, SplitFiles, readable

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
        limit: int = 0,
    ) -> None:
        unknown = sorted(set(columns or {}) - set(OURS))
        if unknown:
            raise ValueError(f"`columns` maps {unknown}, but rows have only {', '.join(OURS)}")
        self.source, self.columns, self.keep, self.root = source, dict(columns or {}), keep, root
        self.subset, self.form, self.bad_rows, self.limit = subset, form, bad_rows, limit

    def build(self, output: Path) -> dict[str, Any]:
        """Write media and rows, and tell how many of each split."""
        ledger, files = Ledger(self.bad_rows), SplitFiles(output, f".{self.form}")
        rows, root = readable(self.source, self.root, ledger, self.subset)
        media = MediaWriter(root, output)
        for row in rows:
            try:
                written = self._row(row, media, ledger.kept[row.split])
            except (RowError, MediaError) as error:
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
        question, answer = given["question"], given["answer"]
        if type(question) is not str or not question.strip():
            raise RowError(f"wanted a text as the question, got {question!r}; map it in `columns`")
        answer = given["answers"] if answer is None else answer
        if answer is None or not str(answer).strip() or answer == []:
            raise RowError(f"wanted an answer, got {answer!r}; map it in `columns`")
        uid = f"{row.split}#{number}" if given["id"] is None else str(given["id"])
        written: dict[str, Any] = {"id": uid, "question": question}
        written |= {"answers": list(map(str, answer))} if type(answer) is list else {"answer": _text(answer)}
        if given["choices"]:
            written["choices"] = list(map(str, given["choices"]))
        for name, kind in (("image", "image"), ("images", "image"), ("video", "video"), ("videos", "video")):
            found: list[Named] = list(named(given[name], kind))
            if given[name] and not found:
                raise RowError(f"`{name}` names no media: {str(given[name])[:60]!r}; map it in `columns`")
            paths = [media.put(one) for one in found]
            if paths:
                written[name] = paths if name.endswith("s") or len(paths) > 1 else paths[0]
        return written | {name: row.columns.get(name) for name in self.keep}


def _text(answer: Any) -> str:
    match answer:
        case bool():
            return "yes" if answer else "no"
    return str(answer)
