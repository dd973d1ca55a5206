"""What may be wrong with the text of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.config.registry import data_check
from mmrl.data.dataset_io import Finding, Rows

ANSWERS = ("answer", "solution", "ground_truth", "chosen", "rejected")


@data_check
def unreadable_rows(rows: Rows) -> Iterator[Finding]:
    """Find rows that are not UTF-8, or no objects."""
    for row in rows:
        if row.fault:
            yield Finding(row.place, row.fault)


@data_check
def duplicate_ids(rows: Rows) -> Iterator[Finding]:
    """Find rows of one split with the same `id`: their answers would be compared as one group."""
    places: dict[tuple[str, str], str] = {}
    for row in rows.sound():
        if row.columns.get("id") is None:
            continue
        key = (row.split, str(row.columns["id"]))
        if key in places:
            yield Finding(row.place, f"the id '{key[1]}' is that of {places[key]}")
        places.setdefault(key, row.place)


@data_check
def empty_answers(rows: Rows) -> Iterator[Finding]:
    """Find rows whose answer is empty, or whose chosen and rejected answers are the same."""
    for row in rows.sound():
        given = {name: said(row.columns[name]) for name in ANSWERS if row.columns.get(name) is not None}
        for name, text in given.items():
            if not text.strip():
                yield Finding(row.place, f"`{name}` is empty")
        if {"chosen", "rejected"} <= given.keys() and given["chosen"].strip() == given[
            "rejected"
        ].strip() != "":
            yield Finding(row.place, f"`chosen` and `rejected` are both {given['chosen'].strip()[:60]!r}")
        listed = row.columns.get("answers")
        if type(listed) is list and not any(said(one).strip() for one in listed):
            yield Finding(row.place, "`answers` holds no answer")


def said(value: Any) -> str:
    """Read the text of an answer: a text, a number, a message, messages (the last counts), or parts."""
    match value:
        case str():
            return value
        case Mapping():
            return said(
                next((value[key] for key in ("content", "value", "text", "path") if key in value), "")
            )
        case [*parts] if parts and all("type" in one for one in parts if isinstance(one, Mapping)):
            return "".join(map(said, parts))
        case [*messages]:
            return said(messages[-1]) if messages else ""
        case None:
            return ""
    return str(value)
