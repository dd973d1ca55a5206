"""Preference pairs on disk: the shards of a build that may be interrupted, and the data set in the end.

A data set is parquet with the pictures in it. `prompt`, `chosen`, `rejected` and `images` are what TRL reads;
`conversations`, `chosen_answer` and `rejected_answer` say the same to LLaMA-Factory, as `dataset_info.json`
tells it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmrl.data.dataset_io import RowError
from mmrl.runtime.files import write_whole
from mmrl.vision.benchmarks.conversions import describe_llama_factory
from mmrl.vision.preference.select import FLIPPED, Pair

BUILD = ".build"
ROWS_AT_ONCE = 64  # of a parquet file, with their pictures


@dataclass(frozen=True)
class Shards:
    """Finished parts of a build, each whole or not there, under `.build` in its output."""

    output: Path

    @property
    def folder(self) -> Path:
        """Find what is kept from one start to the next."""
        return self.output / BUILD

    @property
    def media(self) -> Path:
        """Find the pictures that came inside rows."""
        return self.folder / "media"

    def path(self, number: int) -> Path:
        """Name a shard."""
        return self.folder / f"shard-{number:06d}.jsonl"

    def has(self, number: int) -> bool:
        """Tell whether a shard is finished."""
        return self.path(number).is_file()

    def write(self, number: int, pairs: Iterable[Pair]) -> None:
        """Put a shard down so that it is whole or not there, whatever happens."""
        lines = (json.dumps(asdict(pair), ensure_ascii=False) for pair in pairs)
        write_whole(self.path(number), "".join(f"{line}\n" for line in lines))

    def read(self, number: int) -> list[Pair]:
        """Read a shard."""
        lists = ("texts", "lengths", "scores", "h", "split")
        with self.path(number).open(encoding="utf-8") as file:
            found = [json.loads(line) for line in file]
        return [Pair(**row | {name: tuple(row[name]) for name in lists}) for row in found]

    def tidy(self) -> None:
        """Remove what was being written when a build was killed."""
        for path in self.folder.glob("*.tmp"):
            path.unlink()

    def agree(self, name: str, told: Mapping[str, Any]) -> None:
        """Write down what is built here, or refuse to mix it with what was."""
        text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
        if not (self.folder / f"{name}.json").is_file():
            write_whole(self.folder / f"{name}.json", text)
        known, told = self.told(name), json.loads(text)
        other = [key for key in {**told, **known} if told.get(key) != known.get(key)]
        if other:
            raise RowError(
                f"'{self.folder}' holds a build with another {', '.join(other)}: {known.get(other[0])!r}, "
                f"not {told.get(other[0])!r}; choose another output, or remove the folder"
            )

    def told(self, name: str) -> dict[str, Any]:
        """Read what `agree` wrote."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))


def as_row(pair: Pair, verdict: str, data: bytes) -> dict[str, Any]:
    """Lay a decided pair out as a row. `h_pos` and `h_neg` are those of the answers that were meant to be
    better and worse, whatever was decided; None where no dial made them."""
    better, worse = (1, 0) if verdict == FLIPPED else (0, 1)
    said = [{"role": "assistant", "content": pair.texts[i]} for i in (better, worse)]
    return {
        "id": pair.place,
        "prompt": [{"role": "user", "content": pair.prompt}],
        "chosen": [said[0]],
        "rejected": [said[1]],
        "images": [{"bytes": data, "path": Path(pair.image).name}],
        "score_chosen": pair.scores[better],
        "score_rejected": pair.scores[worse],
        "h_pos": pair.h[0],
        "h_neg": pair.h[1],
        "flipped": verdict == FLIPPED,
        "conversations": [{"role": "user", "content": f"<image>{pair.prompt}"}],
        "chosen_answer": said[0],
        "rejected_answer": said[1],
    }


def features() -> Any:
    """Describe the columns to `datasets`."""
    from datasets import Features, Image, List, Value

    message = {"role": Value("string"), "content": Value("string")}
    return Features(
        {
            "id": Value("string"),
            **{name: List(message) for name in ("prompt", "chosen", "rejected")},
            "images": List(Image()),
            **{name: Value("float64") for name in ("score_chosen", "score_rejected", "h_pos", "h_neg")},
            "flipped": Value("bool"),
            "conversations": List(message),
            "chosen_answer": message,
            "rejected_answer": message,
        }
    )


def write_data_set(output: Path, rows: Iterator[dict[str, Any]], count: int, file_rows: int) -> None:
    """Write about `count` rows, at most `file_rows` a file, in the place of what was there."""
    beside = output / BUILD / "data"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    files = max(1, -(-count // file_rows))
    for number in range(files):
        name = f"train-{number:05d}-of-{files:05d}.parquet"
        _write_file(beside / name, rows, file_rows if number + 1 < files else None)
    shutil.rmtree(output / "data", ignore_errors=True)
    beside.replace(output / "data")
    told = describe_llama_factory(("conversations", "images"), "data")
    told |= {
        "ranking": True,
        "columns": {
            "messages": "conversations",
            "chosen": "chosen_answer",
            "rejected": "rejected_answer",
            "images": "images",
        },
    }
    write_whole(output / "dataset_info.json", json.dumps({"pairs": told}, indent=2) + "\n")


def _write_file(path: Path, rows: Iterator[dict[str, Any]], limit: int | None) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = features().arrow_schema
    left = limit
    with parquet.ParquetWriter(path, schema) as writer:
        while left is None or left > 0:
            size = ROWS_AT_ONCE if left is None else min(left, ROWS_AT_ONCE)
            listed = [row for _, row in zip(range(size), rows, strict=False)]  # in this order none is lost
            if not listed:
                return
            writer.write_table(pyarrow.Table.from_pylist(listed, schema=schema))
            left = None if left is None else left - len(listed)
