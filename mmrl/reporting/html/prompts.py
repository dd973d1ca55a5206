"""The prompts of a run for its page: how often they were asked, how hard they are, what samplers believe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from mmrl.config.schema import ConfigError
from mmrl.reporting.html.layout import spelled, table, templates
from mmrl.reporting.html.samples import read_or_skip
from mmrl.reporting.prompts import BELIEFS, OTHERS, PROMPTS, TOTAL

LISTED = 10  # prompts of a table
BARS = 10  # of a histogram
SOURCES = 40  # rows of a table of beliefs about sources
KINDS: dict[str, str] = dict.fromkeys(("uid", "text", "sampler", "about", "name"), "string")
KINDS |= dict.fromkeys(("asked", "rollouts", "step"), "int64")

Row = Mapping[str, Any]
Beliefs = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Bar:
    """A row of a histogram: its range in words, and a count for every series."""

    label: str
    counts: Sequence[int]


def prompts_section(folder: Path) -> Markup:
    """Lay out what a run wrote about its prompts and the beliefs of its samplers; nothing if it did not."""
    rows, counts = read_rows(
        folder / PROMPTS, ("uid", "text", "asked", "rollouts", "mean", "first", "last", "step")
    )
    if not rows:
        return Markup()
    others = counts.get(OTHERS, 0)
    asked = len(rows) - others
    total = max(counts.get(TOTAL, 0), asked)
    beliefs: dict[str, dict[str, dict[str, float]]] = {}
    for row in read_rows(folder / BELIEFS, ("sampler", "about", "name", "value"))[0]:
        beliefs.setdefault(row["sampler"], {}).setdefault(row["about"], {})[row["name"]] = row["value"]
    known = [row for row in rows if math.isfinite(row["mean"])]
    hardest = sorted(known, key=lambda row: (row["mean"], -row["asked"]))[:LISTED]
    most = sorted(rows, key=lambda row: -row["asked"])[:LISTED]
    about = {row["uid"]: belief_of(beliefs, row["uid"]) for row in [*hardest, *most]}
    uids = {row["uid"] for row in rows}
    again = [row for row in known if row["asked"] > 1]
    html = (
        templates()
        .get_template("prompts.j2")
        .render(
            asked=asked,
            total=total,
            others=others,
            how_often=counts_of([row["asked"] for row in rows], total - asked),
            difficulty=histogram([[row["first"] for row in again], [row["last"] for row in again]]),
            again=len(again),
            hardest=hardest,
            most=most,
            about=about if any(about.values()) else {},
            beliefs=[(place, *belief_table(held, uids)) for place, held in beliefs.items()],
        )
    )
    return Markup(html)


def read_rows(path: Path, names: Sequence[str]) -> tuple[list[dict[str, Any]], dict[bytes, int]]:
    """Read columns of a file of a run as rows, and the whole numbers in its metadata.

    A file that is missing or damaged has no rows.

    Raises:
        ConfigError: A column is missing or has another type than a run writes.
    """
    from pyarrow import parquet

    read = read_or_skip(path, parquet.read_table) if path.exists() else None
    if read is None or not read.num_rows:
        return [], {}
    for name in names:
        kind = KINDS.get(name, "double")
        found = str(read.schema.field(name).type) if name in read.schema.names else "nothing"
        if found != kind or read.column(name).null_count:
            raise ConfigError(
                f"'{path}': the column '{name}' must hold {kind}, not {found}; a run writes it so"
            )
    noted = {name: int(value) for name, value in (read.schema.metadata or {}).items() if value.isdigit()}
    return read.select(list(names)).to_pylist(), noted


def counts_of(values: Sequence[int], never: int) -> list[Bar]:
    """Count prompts by how often they were asked, in at most `BARS` ranges; `never`: not at all."""
    width = -(-max(values) // BARS)  # rounded up
    bins = Counter((value - 1) // width for value in values)
    bars = [Bar("never", [never])] if never else []
    for i in range(max(bins) + 1):
        low, high = i * width + 1, (i + 1) * width
        bars.append(Bar(times(high) if width == 1 else f"{low} to {high} times", [bins[i]]))
    return bars


def times(count: int) -> str:
    """Say how often, in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def histogram(series: Sequence[Sequence[float]]) -> list[Bar]:
    """Count series of values in `BARS` ranges of one width; where all values are equal, in one."""
    values = [value for numbers in series for value in numbers if math.isfinite(value)]
    if not values:
        return []
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(high)):
        return [Bar(spelled(high), [len(numbers) for numbers in series])]
    width = (high - low) / BARS
    digits = max(0, 1 - math.floor(math.log10(width)))  # two digits of a width, so that ends differ
    edges = [f"{low + width * i:.{digits}f}" for i in range(BARS + 1)]

    def place(value: float) -> int:
        # The last range has its upper end as well.
        return min(BARS - 1, int((value - low) / width))

    bins = [Counter(place(value) for value in numbers if math.isfinite(value)) for numbers in series]
    return [Bar(f"{a} to {b}", [counts[i] for counts in bins]) for i, (a, b) in enumerate(pairwise(edges))]


def belief_of(beliefs: Mapping[str, Beliefs], uid: str) -> str:
    """Write what samplers believe of one prompt in one line."""
    found = (held.get(uid, {}) for held in beliefs.values())
    return ", ".join(f"{name} {spelled(value)}" for numbers in found for name, value in numbers.items())


def belief_table(held: Beliefs, uids: set[str]) -> tuple[Markup, str]:
    """Lay out the beliefs of a sampler, and a note on what is left out.

    Beliefs about sources are listed; those about prompts are summed up by their least, median and greatest.
    """
    names = list(dict.fromkeys(name for numbers in held.values() for name in numbers))
    if len(held) > SOURCES or any(about in uids for about in held):
        spread: Sequence[Callable] = (min, median, max)
        rows = []
        for name in names:
            values = [
                numbers[name] for numbers in held.values() if math.isfinite(numbers.get(name, math.nan))
            ]
            rows.append([name, f"{len(values):,}", *(spelled(f(values)) if values else "–" for f in spread)])
        note = "The tables above have the beliefs about the prompts that they list."
        return table(["", "prompts", "least", "median", "greatest"], rows), note
    rows = [
        [about, *(spelled(numbers.get(name, math.nan)) for name in names)] for about, numbers in held.items()
    ]
    return table(["", *names], rows), ""
