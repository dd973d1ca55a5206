"""Reader of CSV and TSV files; the first line names the columns."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mmrl.data.row_files import DataRow, SourceError

SEPARATED = {".csv": ",", ".tsv": "\t"}  # separators by file suffix
LONGEST = 1 << 27  # most characters of a cell


def separated_rows(path: Path, split: str) -> Iterator[DataRow]:
    """Read the rows of a CSV or TSV file; its first line names the columns. Empty cells become None.

    A row with more or fewer cells than column names gets a `fault`. Columns without a name, such as the index
    of pandas, are skipped. Raises `SourceError` for duplicate names, and if another separator was used.
    """
    if not path.is_file():
        raise SourceError(f"there is no file '{path}'")
    csv.field_size_limit(LONGEST)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, delimiter=SEPARATED[path.suffix], strict=True)
        try:
            names = [name.strip() for name in next(lines, [])]
        except csv.Error as error:
            raise SourceError(f"cannot read '{path}': {error}") from error
        others = set(",;|\t") - {SEPARATED[path.suffix]}
        if len(names) == 1 and (other := min(others & set(names[0]), default="")):
            raise SourceError(
                f"the first line of '{path}' is one column, {names[0]!r}: its columns are separated by "
                f"{other!r}, and those of {path.suffix} by {SEPARATED[path.suffix]!r}; write it so"
            )
        if twice := [name for name, count in Counter(filter(None, names)).items() if count > 1]:
            raise SourceError(f"'{path}' names the column '{twice[0]}' twice in its first line")
        while True:
            place = f"{path}:{lines.line_num + 1}"
            try:
                cells = next(lines, None)
            except csv.Error as error:
                yield DataRow(place, split, fault=f"cannot be read: {error}")
                continue
            if cells is None:
                return
            if not any(cells):
                continue
            if len(cells) != len(names):
                fault = f"has {len(cells)} cells, and the first line names {len(names)} columns"
                yield DataRow(place, split, fault=f"{fault}: {', '.join(names)}")
                continue
            yield DataRow(
                place, split, {name: cell or None for name, cell in zip(names, cells, strict=True) if name}
            )
