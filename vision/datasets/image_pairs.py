"""Data set of pairs of images that differ in one thing, for games and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, uid_of
from mmrl.vision.media.media_root import MediaRoot, media_refs
from mmrl.vision.media.prompts import ask
from mmrl.vision.media.video import FrameSampling


@data
def image_pairs(
    *,
    path: str,
    root: str = "",
    question: str = "What is different?",
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read pairs of images from jsonl, JSON, parquet or a folder of `datasets`.

    A row has `original` and `changed`: paths, or encoded images.

    Args:
        path: The file or folder of rows.
        root: Folder of the images; by default that of the rows.
        question: The text of the prompt, which a game replaces.
        bad_rows: Rows that cannot be used raise (`error`) or are skipped and logged (`drop`).
        limit: Most rows to read; 0 for all.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)

    def make(row: DataRow, number: int) -> Prompt:
        shown = []
        for name in ("original", "changed"):
            refs = list(media_refs(row.columns.get(name), "image", name))
            if len(refs) != 1:
                raise RowError(f"wanted one image as `{name}`, got {len(refs)}")
            shown.append(media.medium(refs[0], f"{row.place} ({name})", FrameSampling(1.0)))
        kept = {key: value for key, value in row.all.items() if key not in ("original", "changed")}
        return ask(uid_of(row.columns, f"{row.split}#{number}"), shown, question, None, kept)

    rows, reads = Rows(source, media.root), ("original", "changed")
    return read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)
