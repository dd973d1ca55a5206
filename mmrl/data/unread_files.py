"""Warning about files in a data folder that look like rows, but are not read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

UNREAD = {".ndjson", ".arrow", ".feather", ".tar", ".zip", ".xlsx", ".tfrecord"}  # formats without a reader
_named = set[Path]()  # folders and patterns that already had a warning
log = logging.getLogger("mmrl")


def name_unread(path: Path, listed: Sequence[Path], read: Sequence[Path], forms: Sequence[str]) -> None:
    """Log the files whose suffix suggests rows, but that are not in `read`; once per folder or pattern."""
    suggests_rows = lambda file: file.suffix in UNREAD or not {*file.suffixes[:-1]}.isdisjoint(forms)
    unread = [file.name for file in listed if file not in read and suggests_rows(file)]
    if unread and path not in _named:
        _named.add(path)
        log.warning(
            "'%s' is read without %s; unpack or convert them to %s, or move them away",
            path, ", ".join(unread[:10]), ", ".join(forms),
        )  # fmt: skip
