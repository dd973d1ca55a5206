"""Reading and writing of dataset rows: JSON lines and lists, parquet, CSV, folders of `datasets`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from mmrl.config import objects
from mmrl.core.plain_text import each_text, whole
from mmrl.core.types import Prompt, PromptError
from mmrl.data.fields import RowError, parse_json, short, with_columns
from mmrl.data.object_rows import loose_rows, tables
from mmrl.data.row_fields import CHECK, Column, RowFields, warn_unread
from mmrl.data.row_files import (
    BOM,
    DataRow,
    Found,
    GroupFile,
    LineFile,
    RowFile,
    SourceError,
    TableFile,
    bad_rows_error,
    log_dropped,
)
from mmrl.data.row_prompts import Places, RowPrompts
from mmrl.data.separated import SEPARATED, separated_rows
from mmrl.data.unread_files import name_unread

T = TypeVar("T")
WRITTEN = (".jsonl", ".parquet", ".json")
FORMS = (*WRITTEN, *SEPARATED)
SHARD = re.compile(r"-\d{5}-of-\d{5}$")  # file name suffix of a split's parts on the hub
BATCH = 256  # rows of a parquet file in memory at once
DEEPEST = 64  # most nesting levels of a row, because code that walks through rows is recursive
HELD_OUT = {"test", "val", "valid", "validation", "dev", "eval"}  # split names of held-out data
SURROGATE = re.compile("[\ud800-\udfff]")  # lone surrogate: JSON can escape it, UTF-8 cannot encode it
log = logging.getLogger("mmrl")


@dataclass(frozen=True)
class Rows:
    """All rows of a file or folder; every iteration reads the rows again."""

    path: Path
    root: Path  # folder to which media paths are relative
    special: frozenset[str] = frozenset()  # special tokens of the model, if known

    def __iter__(self) -> Iterator[DataRow]:
        if objects.is_object(str(self.path)):
            yield from object_rows(str(self.path))
            return
        for path in row_files(self.path):
            if path.is_dir():
                yield from saved_rows(path)
            elif path.suffix == ".parquet":
                yield from parquet_rows(path)
            else:
                yield from json_list(path) if path.suffix == ".json" else named_rows(path)

    def valid(self) -> Iterator[DataRow]:
        """Iterate over the rows that can be read."""
        return (row for row in self if not row.fault)


class UniqueIds:
    """Detects duplicate row ids, with which answers to different prompts would form one group."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, str], str] = {}

    def add(self, uid: str, place: str, split: str = "") -> None:
        """Register the id of a row; raises RowError if an earlier row of the split has it."""
        first = self.places.setdefault((split, uid), place)
        if first != place:
            raise RowError(f"the id '{uid}' is that of {first}")


def valid_rows(path: Path) -> Iterator[DataRow]:
    """Yield the rows of a file; raise `RowError` at the first bad row, with a list of all bad rows."""
    rows = iter(Rows(path, path))  # one iterator: the error reads on from the first bad row
    for row in rows:
        if row.fault:
            raise bad_rows_error(path, [f"{bad.place}: {bad.fault}" for bad in (row, *rows) if bad.fault])
        yield row


def read_prompts(
    source: str | Path,
    rows: Iterable[DataRow],
    make: Callable[[DataRow, int], Prompt | None],
    *,
    reads: Sequence[Column] | None = None,
    bad_rows: str = "",
    limit: int = 0,
) -> Sequence[Prompt]:
    """Create a prompt from every row of a dataset; one error lists all bad rows and duplicate ids.

    All rows are read and checked now, but prompts do not stay in memory. On access, a prompt is created again
    from the line of a file, the row of a table of `datasets`, or the row group of a parquet file. The result
    is a list if rows cannot be read again: a JSON list, rows in memory that are no table, row groups of more
    than 16 MiB, rows that a dataset generates.

    Args:
        source: Name of the dataset, for errors.
        rows: The rows.
        make: Maps a row and its number to a prompt, or to None to skip the row; equal arguments must give
            equal prompts. Raises `RowError` with a message that does not name the row.
        reads: The columns that `make` reads, and gets as the row's `columns`. None: no check. Otherwise a
            row is bad if nothing in the run reads a column that `RowFields` knows, such as `chosen`.
        bad_rows: "error" raises; "drop" logs and skips bad rows; "" is for datasets without this option.
        limit: Largest number of prompts; 0: no limit.
    """
    ids, fields = UniqueIds(), None if reads is None else RowFields(reads)
    splits: dict[str, None] = {}

    def prompt_of(row: DataRow, number: int) -> Prompt | None:
        prompt = make(fields.parted(row) if fields else row, number)
        return prompt and replace(prompt, split=row.split)

    places, check = Places(prompt_of), CHECK.get()

    def add_unique(row: DataRow, number: int) -> int | None:
        if prompt := prompt_of(row, number):
            if check is not None:
                check(prompt)
            ids.add(prompt.uid, row.place)
            splits[row.split] = None
            return places.add(prompt, row.found, number)
        return None

    indices = read_each(source, rows, add_unique, bad_rows, limit)
    if fields:
        warn_unread(fields.unread, source)
    if len(splits) > 1 and HELD_OUT & {*splits}:
        wanted = "'%s' holds the splits %s, and all of them are read; a pattern names one: 'folder/train*'"
        log.warning(wanted, source, ", ".join(splits))
    return RowPrompts(places, range(len(indices))) if places.files else list(places.kept.values())


def read_each(
    source: str | Path,
    rows: Iterable[DataRow],
    make: Callable[[DataRow, int], T | None],
    bad_rows: str = "",
    limit: int = 0,
) -> list[T]:
    """List the values that `make` returns for the rows, without None; arguments are as in `read_prompts`."""
    values: list[T] = []
    bad: list[str] = []
    for number, row in enumerate(rows):
        try:
            if row.fault:
                raise RowError(row.fault)
            value = make(row, number)
        except (RowError, PromptError) as error:
            bad.append(f"{row.place}: {with_columns(str(error), row.columns)}")
            continue
        values += [] if value is None else [value]
        if limit and len(values) == limit:
            break
    if bad and bad_rows != "drop":
        raise bad_rows_error(source, bad, "mend them, or set `bad_rows: drop`" if bad_rows else "mend them")
    log_dropped(source, bad, len(values) + len(bad))
    if not values:
        raise SourceError(f"'{source}' holds no row that can be used")
    return values


def row_files(path: Path) -> list[Path]:
    """List the files of a dataset: the file itself, or the files in a folder or its subfolder `data`.

    `.json` files are read only if there are no other files, beside which they hold metadata. A path may
    be a pattern, such as `data/train-*.parquet` or `data/*/validation*`.
    """
    if path.is_file():
        if path.suffix not in FORMS:
            raise SourceError(f"cannot tell what '{path}' holds; rows come as {', '.join(FORMS)}")
        return [path]
    if not path.is_dir():
        listed = sorted(map(Path, glob(str(path))))
        if matches := [one for one in listed if one.is_dir() or one.suffix in FORMS]:
            name_unread(path, listed, matches, FORMS)
            return [file for one in matches for file in row_files(one)]
        raise SourceError(f"there is no file or folder '{path}'")
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return [path]  # written by `datasets`
    listed = sorted(file for home in (path, path / "data") if home.is_dir() for file in home.iterdir())
    for forms in ((".jsonl", ".parquet", *SEPARATED), (".json",)):  # the first group that has files
        if files := [file for file in listed if file.suffix in forms]:
            name_unread(path, listed, files, FORMS)
            return files
    raise SourceError(f"the folder '{path}' holds no rows; they come as {', '.join(FORMS)}")


def split_of(path: Path) -> str:
    """Return the split of a file: `train` for `train-00000-of-00002.parquet`."""
    return SHARD.sub("", path.stem)


def checked(row: DataRow) -> DataRow:
    """Read a row's column `split`; set `fault` if the row is no object, nested too deep or not Unicode."""
    if type(row.columns) is not dict:
        return DataRow(row.place, row.split, fault=f"not a JSON object, but {short(row.columns)}")
    # Without recursion, because a malicious row could exceed Python's recursion limit.
    level: list[Any] = [row.columns]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            match value:
                case str() if not value.isascii() and SURROGATE.search(value):
                    fault = f"half a character, which UTF-8 cannot hold, in {short(value)}"
                    return DataRow(row.place, row.split, fault=fault)
                case Mapping():
                    below += (*value.keys(), *value.values())
                case list() | tuple():
                    below += value
        if not below:  # no deeper values
            split = row.columns.get("split")
            return replace(row, split=split) if type(split) is str and split else row
        level = below
    return DataRow(row.place, row.split, fault=f"nested deeper than {DEEPEST} levels")


def text_lines(path: Path, parse: Callable[[DataRow], DataRow] | None = None) -> Iterator[DataRow]:
    """Read the non-blank lines of a UTF-8 file as rows with the column `line`; lines count from 1."""
    if not path.is_file():
        raise SourceError(f"there is no file '{path}'")
    yield from LineFile(path, split_of(path), parse or (lambda row: row))


def read_text_file(path: Path) -> str:
    """Read a UTF-8 file as a whole; errors name the line."""
    if not path.is_file():
        raise SourceError(f"there is no file '{path}'")
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(f"{path}:{line}: not UTF-8: {error}") from error


def json_lines(path: Path) -> Iterator[DataRow]:
    """Read one JSON object per line, whatever the suffix of the file."""

    def parse(row: DataRow) -> DataRow:
        try:
            return checked(replace(row, columns=parse_json(row.columns["line"])))
        except RowError as error:
            return DataRow(row.place, row.split, fault=f"not a JSON object: {error}")

    yield from text_lines(path, parse)


def named_rows(path: Path) -> Iterator[DataRow]:
    """Read a CSV or TSV file, with column names in its first line, or any other file as JSON lines."""
    rows = lambda: map(checked, separated_rows(path, split_of(path)))
    yield from rows() if path.suffix in SEPARATED else json_lines(path)


def json_list(path: Path) -> Iterator[DataRow]:
    """Read a file that is one JSON list of objects, or else JSON lines."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(BOM).lstrip()[:1]
    rows, lines = None, start == b"{"  # many benchmarks name JSON lines `.json`
    try:
        rows = None if lines and not next(json_lines(path)).fault else parse_json(read_text_file(path))
    except RowError as error:
        if not lines:
            yield DataRow(str(path), split_of(path), fault=f"not JSON: {error}")
            return
    if rows is None and lines:
        yield from json_lines(path)
        return
    if type(rows) is not list:
        raise SourceError(f"'{path}' must hold a list of objects, not {short(rows)}")
    for number, columns in enumerate(rows):
        yield checked(DataRow(f"{path}[{number}]", split_of(path), columns))


@contextmanager
def parquet_of(path: Path) -> Iterator[Any]:
    """Open a parquet file; errors of the reader become a `SourceError`."""
    import pyarrow
    from pyarrow import parquet

    try:
        yield parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"cannot read '{path}': {error}") from error


def parquet_rows(path: Path) -> Iterator[DataRow]:
    """Read a parquet file; rows of large row groups cannot be read again one by one."""
    groups = GroupFile(path, split_of(path), parquet_of, arrow_row)
    with parquet_of(path) as file:
        batches = file.iter_batches(batch_size=BATCH)
        yield from arrow_rows(batches, str(path), groups.split, groups if groups.small else None)


def arrow_rows(
    batches: Iterable[Any], source: str, split: str, file: RowFile | None = None
) -> Iterator[DataRow]:
    """Read the rows of arrow tables, numbered from 0; `file` can read single rows again later."""
    places = ((batch, at) for batch in batches for at in range(batch.num_rows))
    for number, (batch, at) in enumerate(places):
        location = None if file is None else Found(file, number)
        yield arrow_row(batch, at, DataRow(f"{source}[{number}]", split, found=location))


def arrow_row(table: Any, at: int, row: DataRow) -> DataRow:
    """Add the columns of row `at` of an arrow table to `row`; an unconvertible value makes a bad row."""
    import pyarrow

    try:  # one row at a time, so that an unconvertible value affects no other row
        return checked(replace(row, columns=table.slice(at, 1).to_pylist()[0]))
    except UnicodeDecodeError as error:
        return replace(row, fault=f"not UTF-8: {error}")
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        return replace(row, fault=f"cannot be read: {error}")


def saved_rows(path: Path) -> Iterator[DataRow]:
    """Read a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    splits = loaded if (path / "dataset_dict.json").is_file() else {str(loaded.split or path.name): loaded}
    yield from split_rows(splits, str(path))


def hub_rows(name: str, subset: str = "") -> Iterator[DataRow]:
    """Read all splits of a dataset on the Hugging Face hub."""
    import datasets

    try:
        splits = datasets.load_dataset(name, subset or None)
    except (FileNotFoundError, ConnectionError) as error:
        reason = f"nor can a data set of the hub be read: {error}"
        raise SourceError(f"there is no file or folder '{name}' here, {reason}") from error
    yield from split_rows(splits, name)


def object_rows(name: str) -> Iterator[DataRow]:
    """Read the rows of a dataset in the memory of a Python program."""
    if splits := tables(name):
        yield from split_rows(splits, name)
        return
    for number, (split, columns, fault) in enumerate(loose_rows(name)):
        place = f"{name}[{number}]"
        yield DataRow(place, split, fault=fault) if fault else checked(DataRow(place, split, columns))


def split_rows(splits: Mapping[str, Any], source: str) -> Iterator[DataRow]:
    """Read splits of `datasets` in the arrow format, in which images stay encoded (bytes or paths).

    If `set_format` was called on a split, only the columns that it selected are read.
    """
    for split, table in splits.items():
        shown = None if table.format["output_all_columns"] else table.format["columns"]
        stored = table.with_format("arrow", columns=shown)
        table = TableFile(stored, f"{source}: {split}", split, arrow_row)
        yield from arrow_rows(table.table.iter(batch_size=BATCH), table.source, split, table)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines, a JSON list or parquet, by the suffix of the path; return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":  # streamed; other formats need all rows
        count = 0
        with path.open("w", encoding="utf-8") as file:
            for count, row in enumerate(rows, 1):  # noqa: B007
                file.write(whole(json.dumps(row, ensure_ascii=False)) + "\n")
        return count
    listed = [each_text(row, whole) for row in rows]
    if path.suffix == ".json":
        path.write_text(whole(json.dumps(listed, ensure_ascii=False, indent=1)) + "\n", encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        # Collect the columns of all rows, because `Table.from_pylist` reads only the first row's.
        columns = {}
        for name in dict.fromkeys(name for row in listed for name in row):
            try:
                columns[name] = pyarrow.array([row.get(name) for row in listed])
            except (pyarrow.ArrowException, OverflowError) as error:
                raise RowError(f"cannot write the column `{name}` to '{path}': {error}") from error
        parquet.write_table(pyarrow.table(columns), path)
    else:
        raise RowError(f"cannot write rows to '{path}'; name it {', '.join(WRITTEN)}")
    return len(listed)
