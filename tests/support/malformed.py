"""Malformed rows, drawn from a seed: sound rows with something wrong, as JSON lines, JSON or parquet."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

COLUMNS = ("split", "id", "image", "images", "video", "messages", "answers", "scores")
HUGE = 10**401
DEEP = json.loads("[" * 60 + "]" * 60)
TOO_DEEP = json.loads("[" * 90 + "]" * 90)
JUNK = [
    None, True, False, 0, -1, 17, 2.5, HUGE, -HUGE, 1e308, float("nan"), float("inf"), -float("inf"),
    "", " ", "\ud800", "a\udfffb.png", "\x00", "\ufeff", "x" * 100_000, "n" * 5000 + ".png", "../../a.png",
    "a\x00.png", "<image>", "<video><image>", "{question}", "nan", "1e999", "yes", "a.png",
    [], {}, [None], [[]], [[[]]], DEEP, TOO_DEEP, [1, "a", None], ["a.png", 3], [[0, 1], [2]], [[0, 1, 2]],
    {"path": None}, {"path": 5}, {"bytes": None, "path": None}, {"bytes": "a", "path": "a.png"},
    {"url": "a.png"},
    {"type": "image"}, {"type": 3}, {"type": "image", "image": 3}, {"content": None}, {"content": [[]]},
    {"role": [], "content": "x"}, [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "tool", "content": "x"}], ["user", "x"], {"": ""}, {"\ud800": 1}, {"ground_truth": {}},
]  # fmt: skip
OF_PARQUET = [
    b"", b"\xff\xfe", b"no image", datetime(1, 1, 1, tzinfo=UTC), timedelta(days=9), Decimal("1.5"),
    [b"", None], {"bytes": b"", "path": None}, {"bytes": b"x", "path": b"a.png"},
    [{"bytes": None, "path": ""}],
    [datetime(2020, 1, 1)], {"a": {"b": [Decimal(1)]}},
]  # fmt: skip
FOREIGN = [
    b"\xff\xfe", b'{"a": "\xff"}', b"{", b"null", b"[]", b"3", b'"x"', b"{}", b'{"id": 1, "id": 2}',
    b'{"id": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a": ' * 3000 + b"1" + b"}" * 3000,
    b'{"a": "' + b"x" * 3_000_000 + b'"}', b'{"a": NaN, "b": Infinity}', b'{"a": "\\ud800"}', b"\x00",
    b"{} {}", b"\xef\xbb\xbf{}", b"{'a': 1}", b"nan", b'{"a": 1e999}', b'{"a": "\\u0000"}',
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """List every container and key of a row."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def spoiled(row: dict[str, Any], random: Random, junk: list[Any]) -> dict[str, Any]:
    """Spoil one to three places of a row: another value, none, one inside a list, one more column."""
    row = copy.deepcopy(row)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = places(row)
        if not found:
            break
        held, key = random.choice(found)
        kind = random.random()
        if kind < 0.7:
            held[key] = copy.deepcopy(random.choice(junk))
        elif kind < 0.8:
            del held[key]
        elif kind < 0.9:
            held[key] = [held[key]]
        else:
            row[random.choice(COLUMNS)] = copy.deepcopy(random.choice(junk))
    return row


def lines_of(rows: list[Any]) -> bytes:
    """Write rows as JSON lines; bytes are a line as it stands."""
    return b"\n".join(row if type(row) is bytes else json.dumps(row).encode() for row in rows) + b"\n"


def write(path: Path, sound: dict[str, Any], random: Random) -> bool:
    """Write a file with one malformed row, beside a sound one where its form allows; tell whether it does."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        for _ in range(100):
            row = spoiled(sound, random, JUNK + OF_PARQUET)
            try:
                parquet.write_table(pyarrow.Table.from_pylist([row]), path)
                return False
            except (pyarrow.ArrowException, ValueError, OverflowError, TypeError):
                continue  # parquet holds no such row
        raise AssertionError("no row that parquet can hold")
    foreign = random.random() < 0.2
    row = random.choice(FOREIGN) if foreign else spoiled(sound, random, JUNK)
    if path.suffix == ".jsonl":
        path.write_bytes(lines_of([sound, row]))
        return True
    text = row if foreign else json.dumps(row).encode()
    path.write_bytes(b"[" + json.dumps(sound).encode() + b", " + text + b"]")
    return not foreign
