"""Files of preference pairs: shards of a resumable build, and the finished data set.

A data set consists of parquet files that contain the images. TRL reads `prompt`, `chosen`, `rejected` and
`images`; LLaMA-Factory reads `conversations`, `chosen_answer` and `rejected_answer`, see `dataset_info.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from mmrl.runtime.files import write_whole
from mmrl.runtime.shards import BUILD, Shards
from mmrl.vision.benchmarks.conversions import describe_llama_factory
from mmrl.vision.preference.select import FLIPPED, ScoredPair

ROWS_AT_ONCE = 64  # rows per write to a parquet file, with images in memory


class PairShards(Shards):
    """Finished shards of scored pairs; the subfolder `media` holds images that were stored inside rows."""

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self.media = self.folder / "media"

    def write(self, number: int, pairs: Iterable[ScoredPair]) -> None:
        """Write the pairs of a shard to its file atomically."""
        self.write_rows(number, map(asdict, pairs))

    def read(self, number: int) -> list[ScoredPair]:
        """Read the pairs of a shard from its file."""
        lists = ("texts", "lengths", "scores", "h", "split")
        rows = self.read_rows(number)
        return [ScoredPair(**row | {name: tuple(row[name]) for name in lists}) for row in rows]


def as_row(pair: ScoredPair, verdict: str, data: bytes) -> dict[str, Any]:
    """Convert a selected pair to a row of the data set; `data` is the content of the image file.

    `h_pos` and `h_neg` are the hallucination ratios (weights of contrastive decoding) of the answer expected
    to be better and of the other answer, even in a reversed pair. They are None if the engine records none.
    """
    better, worse = (1, 0) if verdict == FLIPPED else (0, 1)
    chosen, rejected = ({"role": "assistant", "content": pair.texts[i]} for i in (better, worse))
    return {
        "id": pair.place,
        "prompt": [{"role": "user", "content": pair.prompt}],
        "chosen": [chosen],
        "rejected": [rejected],
        "images": [{"bytes": data, "path": Path(pair.image).name}],
        "score_chosen": pair.scores[better],
        "score_rejected": pair.scores[worse],
        "h_pos": pair.h[0],
        "h_neg": pair.h[1],
        "flipped": verdict == FLIPPED,
        "conversations": [{"role": "user", "content": f"<image>{pair.prompt}"}],
        "chosen_answer": chosen,
        "rejected_answer": rejected,
    }


def write_data_set(output: Path, rows: Iterator[dict[str, Any]], count: int, file_rows: int) -> None:
    """Write parquet files of at most `file_rows` rows each, and replace an earlier data set.

    `count` is the expected number of rows; `rows` may have fewer. The last file gets all remaining rows.
    """
    import pyarrow
    from datasets import Features, Image, List, Value
    from pyarrow import parquet

    message = {"role": Value("string"), "content": Value("string")}
    features = {
        "id": Value("string"),
        **{name: List(message) for name in ("prompt", "chosen", "rejected")},
        "images": List(Image()),
        **{name: Value("float64") for name in ("score_chosen", "score_rejected", "h_pos", "h_neg")},
        "flipped": Value("bool"),
        "conversations": List(message),
        "chosen_answer": message,
        "rejected_answer": message,
    }
    partial, schema = output / BUILD / "data", Features(features).arrow_schema  # same disk as the target
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = max(1, -(-count // file_rows))  # ceil(count / file_rows)
    for number in range(files):
        name = f"train-{number:05d}-of-{files:05d}.parquet"
        chunk = islice(rows, file_rows if number + 1 < files else None)
        with parquet.ParquetWriter(partial / name, schema) as writer:
            while batch := list(islice(chunk, ROWS_AT_ONCE)):
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
    shutil.rmtree(output / "data", ignore_errors=True)  # the target of a rename must be empty or missing
    partial.replace(output / "data")
    columns = {"messages": "conversations", "chosen": "chosen_answer", "rejected": "rejected_answer"}
    info = describe_llama_factory(("conversations", "images"), "data")
    info |= {"ranking": True, "columns": columns | {"images": "images"}}
    write_whole(output / "dataset_info.json", json.dumps({"pairs": info}, indent=2) + "\n")
