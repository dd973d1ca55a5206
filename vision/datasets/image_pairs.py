"""Data set of pairs of images that differ in one detail, for games and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import uid_of
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import FrameSampling
from mmrl.vision.media.prompts import ask

SIDES = ("original", "changed")  # columns of the two images


@data
def image_pairs(
    *,
    path: str,
    root: str = "",
    question: str = "What is different?",
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read pairs of images from jsonl, JSON, parquet or a folder saved by `datasets`.

    A row has the images `original` and `changed`, each a path or an encoded image.

    Args:
        path: The file or folder of rows.
        root: Folder of the images; by default the folder of the rows.
        question: The text of the prompt; the games in `vision/games/` replace it.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of rows to read; 0: all rows.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)

    def make(row: DataRow, number: int) -> Prompt:
        images = [
            media.reader(f"{row.place} ({name})", FrameSampling())("image", row.columns.get(name), name)
            for name in SIDES
        ]
        kept = {key: value for key, value in row.all.items() if key not in SIDES}
        return ask(uid_of(row.columns, f"{row.split}#{number}"), images, question, None, kept)

    rows = Rows(source, media.root)
    return read_prompts(source, rows, make, reads=SIDES, bad_rows=bad_rows, limit=limit)
