"""Pages from jinja2 templates: one self-contained HTML document, and the tables inside it."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mmrl.core.reward_table import Measured

HERE = Path(__file__).parent
Section = tuple[str, str, Markup]  # anchor, title, content


@cache
def templates() -> Environment:
    """Load the templates of this folder. Everything is escaped but what is Markup already."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


@cache
def macros() -> Any:
    """Return the macros of `parts.j2` (tables, tiles, figures, charts); each gives Markup."""
    return templates().get_template("parts.j2").module


def document(
    title: str,
    fragments: Sequence[str] = (),
    sections: Sequence[Section] = (),
    *,
    heading: str = "",
    subtitle: Markup | str = "",
) -> str:
    """Build a page that loads nothing from elsewhere: for a run, an evaluation or a comparison.

    Args:
        title: Title of the browser's window.
        fragments: HTML to lay out first, one below the other.
        sections: Parts with a heading and a link to each; those without content are left out.
        heading: Text of the first heading, or nothing where a fragment has it.
        subtitle: Line below the heading.
    """
    style, script = ((HERE / name).read_text() for name in ("style.css", "script.js"))
    return (
        templates()
        .get_template("page.j2")
        .render(
            title=title,
            heading=heading,
            subtitle=subtitle,
            fragments=[Markup(fragment) for fragment in fragments],
            sections=[section for section in sections if section[2]],
            style=Markup(style),
            script=Markup(script),
            # Text from files is escaped; a script that gets in by a visualization does not run.
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "") -> Markup:
    """Lay out rows whose first cell is their name; `kind` is a CSS class of the other cells."""
    return macros().table(heads, rows, kind) if rows else Markup()


def metric_table(columns: Mapping[str, Measured]) -> Markup:
    """Show evaluations side by side, one row a metric, with their intervals."""
    return figures_table({title: (found.metrics, found.intervals) for title, found in columns.items()})


def figures_table(
    columns: Mapping[str, tuple[Mapping[str, float], Mapping[str, Sequence[float]]]],
    heads: Sequence[str] = (),
) -> Markup:
    """Show (metrics, intervals) side by side; `heads` replace the columns' names."""
    names = dict.fromkeys(name for metrics, _ in columns.values() for name in metrics)
    rows = [[_breakable(name), *(_with_interval(*pair, name) for pair in columns.values())] for name in names]
    return table(heads or ["", *columns], rows)


def _with_interval(metrics: Mapping[str, float], intervals: Mapping[str, Sequence[float]], name: str) -> str:
    if name not in metrics:
        return ""
    value, (low, high) = metrics[name], intervals.get(name, (math.nan, math.nan))
    number = f"{value:.3f}" if abs(value) < 1e4 else f"{value:,.0f}"
    return (
        Markup("{} <small>{:.3f} – {:.3f}</small>").format(number, low, high)
        if math.isfinite(low)
        else number
    )


def _breakable(name: str) -> Markup:
    """Let a browser break the name of a metric after `/` and `_`."""
    return escape(name).replace("/", Markup("/<wbr>")).replace("_", Markup("_<wbr>"))


def duration(seconds: float) -> str:
    """Write a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
