"""Checks of data sets that find faulty rows by their text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.config.registry import check
from mmrl.core.plain_text import COMMON
from mmrl.data.dataset_io import DataRow, RowError, Rows, UniqueIds
from mmrl.diagnostics.context import Finding

ANSWERS = ("answer", "solution", "ground_truth", "chosen", "rejected")


@check(on="data")
def unreadable_rows(rows: Rows) -> Iterator[Finding]:
    """Find rows that are not UTF-8 or not JSON objects."""
    for row in rows:
        if row.fault:
            yield Finding(row.fault, place=row.place)


@check(on="data")
def duplicate_ids(rows: Rows) -> Iterator[Finding]:
    """Find rows of one split with the same `id`; their answers would be compared as one group."""
    ids = UniqueIds()
    for row in rows.valid():
        if row.columns.get("id") is not None:
            try:
                ids.add(str(row.columns["id"]), row.place, row.split)
            except RowError as error:
                yield Finding(str(error), place=row.place)


@check(on="data")
def empty_answers(rows: Rows) -> Iterator[Finding]:
    """Find rows whose answer is empty or missing, or whose chosen and rejected answers are equal."""
    having = Counter(row.source for row in rows.valid() if _answers(row))
    for row in rows.valid():
        if having[row.source] and not _answers(row):
            yield Finding(f"has no answer; {having[row.source]} rows of its file have one", place=row.place)
        texts = {
            name: text_of(row.columns[name]).strip() for name in ANSWERS if row.columns.get(name) is not None
        }
        for name, text in texts.items():
            value = row.columns[name]
            if not text or isinstance(value, float) and not math.isfinite(value):
                yield Finding(f"`{name}` is {value if text else 'empty'}", place=row.place)
        chosen = texts.get("chosen")
        if chosen and chosen == texts.get("rejected"):
            yield Finding(f"`chosen` and `rejected` are both {chosen[:60]!r}", place=row.place)
        answers = row.columns.get("answers")
        if type(answers) is list and not any(text_of(answer).strip() for answer in answers):
            yield Finding("`answers` holds no answer", place=row.place)


def _answers(row: DataRow) -> list[str]:
    named = (*ANSWERS, "answers", "target", "messages", "conversations", "completion")
    return [name for name in named if row.columns.get(name) is not None]


@check(on="data")
def special_tokens(rows: Rows) -> Iterator[Finding]:
    """Find rows whose texts contain special tokens of a model, such as <|im_end|>."""
    own = "|".join(map(re.escape, sorted(rows.special, key=len, reverse=True)))
    pattern = re.compile(own) if own else COMMON
    for row in rows.valid():
        for name, value in row.columns.items():
            tokens = dict.fromkeys(word for text in texts_in(value) for word in pattern.findall(text))
            if tokens:
                yield Finding(f"`{name}` holds {', '.join(map(repr, tokens))}", place=row.place)


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value of a row, however deeply nested."""
    match value:
        case str():
            yield value
        case Mapping():
            for item in value.values():
                yield from texts_in(item)
        case list() | tuple():
            for item in value:
                yield from texts_in(item)


def text_of(value: Any) -> str:
    """Return the text of an answer: a text, a number, a message, the last of several messages, or parts."""
    match value:
        case str():
            return value
        case Mapping():
            texts = (value[key] for key in ("content", "value", "text", "path") if key in value)
            return text_of(next(texts, ""))
        # Parts of one message have a `type` (`{type: text, text: ...}`); messages have a `role`.
        case [*parts] if parts and all("type" in part for part in parts if isinstance(part, Mapping)):
            return "".join(map(text_of, parts))
        case [*messages]:
            return text_of(messages[-1]) if messages else ""
        case None:
            return ""
    return str(value)
