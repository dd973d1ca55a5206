"""Rows of data sets on disk: JSON lines, JSON lists, parquet, and folders of `datasets`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMS = (".jsonl", ".parquet", ".json")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")  # how the hub numbers the files of one split
BATCH = 256  # rows of a parquet file held at once


class RowError(ValueError):
    """A row, or a file of rows, that cannot be used. The message names the place."""


@dataclass(frozen=True)
class DataRow:
    """One row: where it stands, which split it belongs to, and what it holds, or why it cannot be read."""

    place: str
    split: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True)
class Rows:
    """All rows of a file or a folder, read anew each time one goes through them; media paths are relative to
    `root`."""

    path: Path
    root: Path

    def __iter__(self) -> Iterator[DataRow]:
        for source in row_files(self.path):
            for row in _read(source):
                told = row.columns.get("split")
                yield DataRow(row.place, told, row.columns) if isinstance(told, str) and told else row

    def sound(self) -> Iterator[DataRow]:
        """Go through the rows that can be read."""
        return (row for row in self if not row.fault)


@dataclass(frozen=True)
class Finding:
    """Something wrong with a data set, and where."""

    place: str
    what: str


def sound_rows(path: Path) -> Iterator[DataRow]:
    """Read rows, and refuse those that cannot be read."""
    for row in Rows(path, path):
        if row.fault:
            raise RowError(f"{row.place}: {row.fault}")
        yield row


def row_files(path: Path) -> list[Path]:
    """List the files that hold the rows of a data set: itself, or what lies in the folder.

    Lists in JSON count only where nothing else does: beside other files they describe rather than hold rows.
    """
    if path.is_file():
        if path.suffix not in FORMS:
            raise RowError(f"cannot tell what '{path}' holds; rows come as {', '.join(FORMS)}")
        return [path]
    if not path.is_dir():
        raise RowError(f"there is no file or folder '{path}'")
    if _is_saved(path):
        return [path]
    for forms in ((".jsonl", ".parquet"), (".json",)):
        homes = [path, path / "data"]
        found = sorted(
            one for home in homes if home.is_dir() for one in home.iterdir() if one.suffix in forms
        )
        if found:
            return found
    raise RowError(f"the folder '{path}' holds no rows; they come as {', '.join(FORMS)}")


def split_of(path: Path) -> str:
    """Tell the split of a file from its name: `train-00000-of-00002.parquet` belongs to `train`."""
    return SHARD.sub("", path.stem)


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _read(path: Path) -> Iterator[DataRow]:
    readers = {".jsonl": _read_lines, ".json": _read_list, ".parquet": _read_parquet}
    return _read_saved(path) if path.is_dir() else readers[path.suffix](path)


def _read_lines(path: Path) -> Iterator[DataRow]:
    split = split_of(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line.removeprefix(b"\xef\xbb\xbf"), f"{path}:{number}", split)


def _parsed(line: bytes, place: str, split: str) -> DataRow:
    try:
        columns = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return DataRow(place, split, fault=f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        return DataRow(place, split, fault=f"not a JSON object: {error}")
    if type(columns) is not dict:
        return DataRow(place, split, fault=f"not a JSON object, but {str(columns)[:80]!r}")
    return DataRow(place, split, columns)


def _read_list(path: Path) -> Iterator[DataRow]:
    if _begins_with(path, b"{"):  # many benchmarks name JSON lines so
        yield from _read_lines(path)
        return
    try:
        listed = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield DataRow(str(path), split_of(path), fault=f"not UTF-8: {error}")
        return
    except json.JSONDecodeError as error:
        yield DataRow(str(path), split_of(path), fault=f"not JSON: {error}")
        return
    if type(listed) is not list:
        raise RowError(f"'{path}' must hold a list of objects, not {str(listed)[:80]!r}")
    for number, columns in enumerate(listed):
        place = f"{path}[{number}]"
        fault = "" if type(columns) is dict else f"not an object, but {str(columns)[:80]!r}"
        yield DataRow(place, split_of(path), {} if fault else columns, fault)


def _begins_with(path: Path, sign: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == sign


def _read_parquet(path: Path) -> Iterator[DataRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=BATCH)
        number = 0
        for batch in batches:
            for at in range(batch.num_rows):
                yield _one_of(batch, at, f"{path}[{number}]", split_of(path))
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise RowError(f"cannot read '{path}': {error}") from error


def _one_of(batch: Any, at: int, place: str, split: str) -> DataRow:
    try:
        return DataRow(place, split, batch.slice(at, 1).to_pylist()[0])
    except UnicodeDecodeError as error:
        return DataRow(place, split, fault=f"not UTF-8: {error}")


def _read_saved(path: Path) -> Iterator[DataRow]:
    """Read what `datasets` saved to disk."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    # One split, or a mapping of them.
    splits = loaded if (path / "dataset_dict.json").is_file() else {str(loaded.split or path.name): loaded}
    yield from _rows_of(splits, str(path))


def hub_rows(name: str, subset: str = "") -> Iterator[DataRow]:
    """Read all splits of a data set of the hub."""
    import datasets

    yield from _rows_of(datasets.load_dataset(name, subset or None), name)


def _rows_of(splits: Mapping[str, Any], source: str) -> Iterator[DataRow]:
    """Go through splits of `datasets`. Pictures stay encoded, as bytes or paths."""
    import datasets

    for split, table in splits.items():
        for name, feature in table.features.items():
            if type(feature) is datasets.Image:
                table = table.cast_column(name, datasets.Image(decode=False))
            elif type(getattr(feature, "feature", None)) is datasets.Image:
                table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
        for number, columns in enumerate(table):
            yield DataRow(f"{source}: {split}[{number}]", split, columns)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, a JSON list or parquet, as the name says; count them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        return count
    listed = [dict(row) for row in rows]
    if path.suffix == ".json":
        path.write_text(json.dumps(listed, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        # The columns of the first row alone would be written otherwise.
        names = list(dict.fromkeys(name for row in listed for name in row))
        columns = {name: [row.get(name) for row in listed] for name in names}
        parquet.write_table(pyarrow.table(columns), path)
    else:
        raise RowError(f"cannot write rows to '{path}'; name it {', '.join(FORMS)}")
    return len(listed)
