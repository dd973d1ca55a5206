"""Random access to the rows of files and tables, so that rows need not stay in memory.

A row of a text file is read by its offset, a row of a table of `datasets` by its number, and a row of a
parquet file by its row group and number. The files must not change while a run reads them.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mmrl.config.schema import ConfigError
from mmrl.core.byte_lru import ByteLRU
from mmrl.data.fields import RowError

log = logging.getLogger("mmrl")

BOM = b"\xef\xbb\xbf"  # byte order mark, with which some editors begin files
PLACE = re.compile(r"(:\d+|\[\d+\])$")  # line or row number at the end of `DataRow.place`
GROUP_BYTES = 16 << 20  # larger row groups of parquet are not decoded for single rows
GROUP_ROWS = 1 << 14  # limit in rows, because the size of compressed groups can be misleading
# Cache of the last decoded row groups of all files, as tables of pyarrow.
GROUPS: ByteLRU[Any] = ByteLRU(4 * GROUP_BYTES, lambda table: table.nbytes)
SHOWN = 10  # most bad rows that an error lists


class SourceError(RowError, ConfigError):
    """Error for a file or folder of rows that is missing, unreadable or empty."""


def bad_rows_error(source: str | Path, bad: Sequence[str], advice: str = "mend them") -> SourceError:
    """Create an error from lines "place: reason" about bad rows; rows with equal reasons share a line."""
    places: dict[str, list[str]] = {}
    for place, _, reason in (line.partition(": ") for line in bad[:SHOWN]):
        places.setdefault(reason, []).append(place)
    shown = [": ".join(filter(None, (", ".join(named), reason))) for reason, named in places.items()]
    shown += [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
    rows = "1 row" if len(bad) == 1 else f"{len(bad)} rows"
    return SourceError(f"{rows} of '{source}' cannot be used; {advice}:\n  " + "\n  ".join(shown))


class RowFile(Protocol):
    """A file or table with random access to rows."""

    def row(self, found: Found) -> DataRow:
        """Read a row; raises `SourceError` if the file has changed since it was first read."""
        ...


class Found(NamedTuple):
    """Location of a row: file, byte offset or row number, and line number for errors."""

    file: RowFile
    at: int
    line: int = 0


@dataclass(frozen=True)
class DataRow:
    """One row of a dataset: its file and line, its split, and its columns, or the `fault` of a bad row.

    For a data set that declares its columns, `columns` has the declared columns and `others` the rest.
    """

    place: str
    split: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    found: Found | None = field(default=None, repr=False, compare=False)  # None: no random access
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, Any]:
        """All columns of the row, which rewards get by name."""
        return {**self.columns, **self.others}

    def renamed(self, columns: Mapping[str, str] | None) -> dict[str, Any]:
        """Return `columns` plus copies under new names; the option maps {new name: name in the file}."""
        return {**self.columns, **{ours: self.columns.get(name) for ours, name in (columns or {}).items()}}

    @property
    def source(self) -> str:
        """The file of the row, or the split of a dataset of the hub."""
        return PLACE.sub("", self.place)


# Function (pyarrow table, row number, row without columns) -> row with columns.
Convert = Callable[[Any, int, DataRow], DataRow]


class Unchanged:
    """The sizes and modification times of files, to detect that a file has changed."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.stamps = tuple((path, self._stamp(path)) for path in paths)

    def check(self) -> None:
        """Raise `SourceError` if a file changed or is gone."""
        for path, stamp in self.stamps:
            if self._stamp(path) != stamp:
                raise changed(path)

    @staticmethod
    def _stamp(path: str | Path) -> tuple[int, int]:
        try:
            status = Path(path).stat()
        except OSError as error:
            raise changed(path) from error
        return status.st_size, status.st_mtime_ns


def changed(place: str | Path) -> SourceError:
    """Create the error about a file that changed after the data were read."""
    return SourceError(f"'{place}' changed after it was read; a run reads its rows from there: start again")


class LineFile:
    """A text file with one row per non-blank line; `parse` replaces the column `line` by parsed columns."""

    def __init__(self, path: Path, split: str, parse: Callable[[DataRow], DataRow]) -> None:
        self.path, self.split, self.parse, self.files = path, split, parse, Unchanged([path])

    def __iter__(self) -> Iterator[DataRow]:
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.removeprefix(BOM).strip():
                    yield self._parsed(line, Found(self, at, number))
                at += len(line)

    def row(self, found: Found) -> DataRow:
        """Read the row at the byte offset in its location `found`."""
        self.files.check()
        with self.path.open("rb") as file:
            file.seek(found.at)
            return self._parsed(file.readline(), found)

    def _parsed(self, line: bytes, found: Found) -> DataRow:
        row = DataRow(f"{self.path}:{found.line}", self.split, found=found)
        try:
            text = line.removeprefix(BOM).decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            return DataRow(row.place, row.split, fault=f"not UTF-8: {error}")
        return self.parse(DataRow(row.place, row.split, {"line": text}, found=found))


@dataclass(eq=False)
class TableFile:
    """A table of `datasets` in the arrow format."""

    table: Any
    source: str
    split: str
    convert: Convert

    def __post_init__(self) -> None:
        # The memory-mapped files; a table in memory has none.
        self.files = Unchanged(item["filename"] for item in self.table.cache_files)

    def row(self, found: Found) -> DataRow:
        """Read the row with the row number in its location `found`."""
        self.files.check()
        row = DataRow(f"{self.source}[{found.at}]", self.split, found=found)
        return self.convert(self.table[found.at : found.at + 1], 0, row)


@dataclass(eq=False)
class GroupFile:
    """A parquet file with a cache of decoded row groups.

    `small` is False if some row group is too large for random access; read such a file as a whole.
    """

    path: Path
    split: str
    open: Callable[[Path], Any]  # a context manager of `pyarrow.parquet.ParquetFile`
    convert: Convert

    def __post_init__(self) -> None:
        self.files = Unchanged([self.path])
        with self.open(self.path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self.small = all(g.total_byte_size <= GROUP_BYTES and g.num_rows <= GROUP_ROWS for g in groups)
            self.starts = [0, *accumulate(group.num_rows for group in groups)]

    def row(self, found: Found) -> DataRow:
        """Read the row with the number in `found`, by decoding its whole row group."""
        self.files.check()
        group = bisect_right(self.starts, found.at) - 1  # skips empty groups
        table = GROUPS.get((self.files.stamps, group), lambda: self._group(group))
        row = DataRow(f"{self.path}[{found.at}]", self.split, found=found)
        return self.convert(table, found.at - self.starts[group], row)

    def _group(self, group: int) -> Any:
        with self.open(self.path) as file:
            return file.read_row_group(group)


def log_dropped(source: str | Path, lines: Sequence[str], total: int) -> None:
    """Log every dropped row, and how many of all rows were dropped."""
    for line in lines:
        log.warning("dropped %s", line)
    if lines:
        log.warning("%s: %d of %d rows are left out", source, len(lines), total)
