"""Rows of data sets on disk: JSON lines, JSON lists, parquet, and folders of `datasets`."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmrl.config.schema import ConfigError
from mmrl.core.types import Prompt
from mmrl.data.fields import RowError, short

FORMS = (".jsonl", ".parquet", ".json")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")  # how the hub numbers the files of one split
BATCH = 256  # rows of a parquet file held at once
DEEPEST = 64  # levels of lists and objects in a row; code that goes through them calls itself
SHOWN = 10  # bad rows that an error names
PLACE = re.compile(r"(:\d+|\[\d+\])$")
SURROGATE = re.compile("[\ud800-\udfff]")
log = logging.getLogger("mmrl")


class SourceError(RowError, ConfigError):
    """A file or folder of rows that a configuration names, but that is missing, unreadable or empty."""


@dataclass(frozen=True)
class DataRow:
    """One row: where it stands, which split it belongs to, and what it holds, or why it cannot be read."""

    place: str
    split: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""

    @property
    def source(self) -> str:
        """Name the file of the row, or the split of a data set of the hub."""
        return PLACE.sub("", self.place)


@dataclass(frozen=True)
class Rows:
    """All rows of a file or a folder, read anew each time one goes through them; media paths are relative to
    `root`."""

    path: Path
    root: Path

    def __iter__(self) -> Iterator[DataRow]:
        return (row for source in row_files(self.path) for row in _read(source))

    def valid(self) -> Iterator[DataRow]:
        """Go through the rows that can be read."""
        return (row for row in self if not row.fault)


def valid_rows(path: Path) -> Iterator[DataRow]:
    """Read rows, and refuse a file of which some cannot be read."""
    rows = iter(Rows(path, path))
    for row in rows:
        if row.fault:
            raise bad_rows_error(path, [f"{one.place}: {one.fault}" for one in (row, *rows) if one.fault])
        yield row


def bad_rows_error(source: str | Path, bad: Sequence[str], advice: str = "mend them") -> RowError:
    """Make the error that counts the rows that cannot be used, and names the first of them."""
    shown = [*bad[:SHOWN], *([f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else [])]
    rows = "1 row" if len(bad) == 1 else f"{len(bad)} rows"
    return RowError(f"{rows} of '{source}' cannot be used; {advice}:\n  " + "\n  ".join(shown))


def read_prompts(
    source: str | Path,
    rows: Iterable[DataRow],
    make: Callable[[DataRow, int], Prompt | None],
    *,
    bad_rows: str = "",
    limit: int = 0,
) -> list[Prompt]:
    """Make a prompt of every row, at most `limit` (0: all). `make` gets a row and its number from 0; it may
    give None, which leaves the row out, or raise a `RowError` without the place.

    Rows that cannot be used are counted and named together, or with `bad_rows` "drop" named in the log and
    left out; "" stands for data sets that have no such option. So are rows whose id was there before: their
    answers would be compared as one group.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    bad = []
    for number, row in enumerate(rows):
        try:
            if row.fault:
                raise RowError(row.fault)
            prompt = make(row, number)
            if prompt is not None and prompt.uid in places:
                raise RowError(f"the id '{prompt.uid}' is that of {places[prompt.uid]}")
        except RowError as error:
            bad.append(f"{row.place}: {error}")
            continue
        if prompt is not None:
            places[prompt.uid] = row.place
            prompts.append(prompt)
            if len(prompts) == limit:
                break
    if bad and bad_rows != "drop":
        raise bad_rows_error(source, bad, "mend them, or set `bad_rows: drop`" if bad_rows else "mend them")
    for line in bad:
        log.warning("dropped %s", line)
    if not prompts:
        raise SourceError(f"'{source}' holds no row that can be used")
    return prompts


def row_files(path: Path) -> list[Path]:
    """List the files that hold the rows of a data set: itself, or what lies in the folder.

    Lists in JSON count only where nothing else does: beside other files they describe rather than hold rows.
    """
    if path.is_file():
        if path.suffix not in FORMS:
            raise SourceError(f"cannot tell what '{path}' holds; rows come as {', '.join(FORMS)}")
        return [path]
    if not path.is_dir():
        raise SourceError(f"there is no file or folder '{path}'")
    if _is_saved(path):
        return [path]
    for forms in ((".jsonl", ".parquet"), (".json",)):
        homes = [path, path / "data"]
        found = sorted(
            one for home in homes if home.is_dir() for one in home.iterdir() if one.suffix in forms
        )
        if found:
            return found
    raise SourceError(f"the folder '{path}' holds no rows; they come as {', '.join(FORMS)}")


def split_of(path: Path) -> str:
    """Tell the split of a file from its name: `train-00000-of-00002.parquet` belongs to `train`."""
    return SHARD.sub("", path.stem)


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _read(path: Path) -> Iterator[DataRow]:
    readers = {".jsonl": json_lines, ".json": _read_list, ".parquet": _read_parquet}
    return _read_saved(path) if path.is_dir() else readers[path.suffix](path)


def checked(row: DataRow) -> DataRow:
    """Let a row name its split, and refuse what no code should go through: a row nested too deep, or texts
    that UTF-8 cannot hold."""
    level: list[Any] = [row.columns]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if not one.isascii() and SURROGATE.search(one):
                    what = f"half a character, which UTF-8 cannot hold, in {short(one)}"
                    return DataRow(row.place, row.split, fault=what)
            elif isinstance(one, Mapping):
                below += (*one.keys(), *one.values())
            elif isinstance(one, list | tuple):
                below += one
        if not below:
            named = row.columns.get("split")
            return replace(row, split=named) if isinstance(named, str) and named else row
        level = below
    return DataRow(row.place, row.split, fault=f"nested deeper than {DEEPEST} levels")


def text_lines(path: Path) -> Iterator[DataRow]:
    """Read the lines of a UTF-8 file that hold something, each as the column `line`, numbered from 1."""
    if not path.is_file():
        raise SourceError(f"there is no file '{path}'")
    split = split_of(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                place = f"{path}:{number}"
                try:
                    yield DataRow(place, split, {"line": line.decode("utf-8").rstrip("\r\n")})
                except UnicodeDecodeError as error:
                    yield DataRow(place, split, fault=f"not UTF-8: {error}")


def read_text_file(path: Path) -> str:
    """Read a UTF-8 file that is no list of rows."""
    if not path.is_file():
        raise SourceError(f"there is no file '{path}'")
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(f"{path}:{line}: not UTF-8: {error}") from error


def json_lines(path: Path) -> Iterator[DataRow]:
    """Read one JSON object a line, whatever the file is called."""
    for row in text_lines(path):
        yield row if row.fault else _parsed(row)


def _parsed(row: DataRow) -> DataRow:
    try:
        columns = parse_json(row.columns["line"])
    except RowError as error:
        return DataRow(row.place, row.split, fault=f"not a JSON object: {error}")
    return _object(columns, row.place, row.split, "a JSON object")


def _object(columns: Any, place: str, split: str, wanted: str) -> DataRow:
    if type(columns) is not dict:
        return DataRow(place, split, fault=f"not {wanted}, but {short(columns)}")
    return checked(DataRow(place, split, columns))


def parse_json(text: str) -> Any:
    """Read JSON. Keys that stand twice, numbers of thousands of digits and endless nesting are refused."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RowError(str(error)) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RowError(f"the key {short(twice)} stands twice")
    return found


def _read_list(path: Path) -> Iterator[DataRow]:
    if _begins_with(path, b"{"):  # many benchmarks name JSON lines so
        yield from json_lines(path)
        return
    try:
        found = parse_json(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield DataRow(str(path), split_of(path), fault=f"not UTF-8: {error}")
        return
    except RowError as error:
        yield DataRow(str(path), split_of(path), fault=f"not JSON: {error}")
        return
    if type(found) is not list:
        raise SourceError(f"'{path}' must hold a list of objects, not {short(found)}")
    for number, columns in enumerate(found):
        yield _object(columns, f"{path}[{number}]", split_of(path), "an object")


def _begins_with(path: Path, sign: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == sign


def _read_parquet(path: Path) -> Iterator[DataRow]:
    number = 0
    with parquet_of(path) as file:
        for batch in file.iter_batches(batch_size=BATCH):
            for at in range(batch.num_rows):
                yield row_of(batch, at, f"{path}[{number}]", split_of(path))
                number += 1


@contextmanager
def parquet_of(path: Path) -> Iterator[Any]:
    """Open a parquet file; what is wrong with it is a `SourceError`."""
    import pyarrow
    from pyarrow import parquet

    try:
        yield parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"cannot read '{path}': {error}") from error


def row_of(batch: Any, at: int, place: str, split: str) -> DataRow:
    """Read one row of an arrow table, which may hold values that Python has none for."""
    import pyarrow

    try:
        return checked(DataRow(place, split, batch.slice(at, 1).to_pylist()[0]))
    except UnicodeDecodeError as error:
        return DataRow(place, split, fault=f"not UTF-8: {error}")
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        return DataRow(place, split, fault=f"cannot be read: {error}")


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

    try:
        splits = datasets.load_dataset(name, subset or None)
    except (FileNotFoundError, ConnectionError) as error:
        reason = f"nor can a data set of the hub be read: {error}"
        raise SourceError(f"there is no file or folder '{name}' here, {reason}") from error
    yield from _rows_of(splits, name)


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
            yield checked(DataRow(f"{source}: {split}[{number}]", split, columns))


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
        columns = {name: _array([row.get(name) for row in listed], name, path) for name in names}
        parquet.write_table(pyarrow.table(columns), path)
    else:
        raise RowError(f"cannot write rows to '{path}'; name it {', '.join(FORMS)}")
    return len(listed)


def _array(values: list[Any], name: str, path: Path) -> Any:
    import pyarrow

    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise RowError(f"cannot write the column `{name}` to '{path}': {error}") from error
