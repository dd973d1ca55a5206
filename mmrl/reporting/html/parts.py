"""What pages are made of: the page itself, tiles, tables."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmrl.core.reward_table import Measured
from mmrl.reporting.html.charts import spelled, style_of

HERE = Path(__file__).parent


def document(title: str, sections: Sequence[str]) -> str:
    """Put fragments into a page that needs nothing but itself."""
    style, script = (HERE / "style.css").read_text(), (HERE / "script.js").read_text()
    known = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # What comes from files is escaped; a script that gets in all the same, as by an exhibit, does not run.
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{known}'"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{allowed}">'
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        # An empty icon, because browsers would otherwise ask for one.
        "<link rel=icon href='data:,'>"
        f"<title>{html.escape(title)}</title><style>{style}</style><main>{''.join(sections)}</main>"
        f"<script>{script}</script></html>"
    )


def metric_table(columns: Mapping[str, Measured]) -> str:
    """Lay evaluations side by side, one row a metric, with their intervals."""
    return figures_table({title: (one.metrics, one.intervals) for title, one in columns.items()})


def figures_table(
    columns: Mapping[str, tuple[Mapping[str, float], Mapping[str, Sequence[float]]]], chips: bool = False
) -> str:
    """Lay (metrics, intervals) side by side; `chips` mark the columns by the colours of their lines."""
    names = dict.fromkeys(name for metrics, _ in columns.values() for name in metrics)
    rows = [
        [
            breakable(name),
            *(with_interval(metrics, intervals, name) for metrics, intervals in columns.values()),
        ]
        for name in names
    ]
    heads = [(chip(i) if chips else "") + html.escape(title) for i, title in enumerate(columns)]
    return table(["", *heads], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], value: str = "") -> str:
    """Lay out rows of HTML; the first cell of each is its name. `value` is a class of the other cells."""
    kind = f" class={value}" if value else ""
    head = "".join(f"<th>{one}</th>" for one in heads)
    body = "".join(
        f"<tr><th>{row[0]}</th>{''.join(f'<td{kind}>{cell}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f"<div class=wide tabindex=0><table><tr>{head}</tr>{body}</table></div>"


def with_interval(metrics: Mapping[str, float], intervals: Mapping[str, Sequence[float]], name: str) -> str:
    """Write a number and where its interval ends."""
    if name not in metrics:
        return ""
    low, high = intervals.get(name, (math.nan, math.nan))
    spread = f" <small>{low:.3f} – {high:.3f}</small>" if math.isfinite(low) else ""
    return f"{_number(metrics[name])}{spread}"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:,.0f}"


def breakable(name: str) -> str:
    """Let the name of a metric be broken where a word of it ends."""
    return html.escape(name).replace("/", "/<wbr>").replace("_", "_<wbr>")


def chip(place: int) -> str:
    """Show the colour of a line."""
    return f"<i class=chip style='background:{style_of(place)[0]}'></i>"


def tile(title: str, value: str, below: str = "") -> str:
    """Show one number large."""
    small = f"<small>{html.escape(below)}</small>" if below else ""
    return f"<div class=tile><span>{html.escape(title)}</span><b>{html.escape(value)}</b>{small}</div>"


def change(start: float, end: float) -> str:
    """Say from where a number came."""
    if not math.isfinite(start):
        return ""
    return "as at the start" if start == end else f"{spelled(start)} at the start ({end - start:+.2g})"


def section(title: str, *inside: str, name: str = "") -> str:
    """Put fragments under a heading; nothing where there is none."""
    if not any(inside):
        return ""
    anchor = f" id='{html.escape(name)}'" if name else ""
    return f"<h2{anchor}>{html.escape(title)}</h2>{''.join(inside)}"


def grid(figures: Sequence[str]) -> str:
    """Lay figures beside and below each other."""
    drawn = "".join(figures)
    return f"<div class=grid>{drawn}</div>" if drawn else ""


def folded(title: str, inside: str) -> str:
    """Hide what is long until it is asked for."""
    return f"<details class=box><summary>{html.escape(title)}</summary>{inside}</details>"


def duration(seconds: float) -> str:
    """Write a time as people read it."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"
