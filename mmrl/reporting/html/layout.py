"""HTML pages and tables from jinja2 templates, and formatting of numbers."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mmrl.reporting.thumbnails import data_uri

HERE = Path(__file__).parent
Section = tuple[str, str, Markup]  # anchor, title and content


@cache
def templates() -> Environment:
    """Load the templates of this folder; all values except Markup are escaped."""
    blocks = {"trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(HERE)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    # Write JSON, such as the points of charts, without spaces.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"spelled": spelled, "duration": duration, "data_uri": data_uri}
    environment.filters["breakable"] = breakable
    environment.filters["last_of"] = lambda run, name: run.ends(name)[1]
    environment.tests["finite"] = math.isfinite
    return environment


@cache
def macros() -> Any:
    """Load the macros of `parts.j2` (tables, tiles, figures, charts); each returns Markup."""
    return templates().get_template("parts.j2").module


def document(
    title: str,
    fragments: Sequence[str] = (),
    sections: Sequence[Section] = (),
    *,
    heading: str = "",
    subtitle: Markup | str = "",
    script: str = "script.js",
) -> str:
    """Render a self-contained page, with its style and script.

    After the heading and the subtitle come the HTML `fragments`, then the `sections` with a link to each;
    sections without content are left out. `script` is a file of this folder.
    """
    style, code = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("style.css", script))
    page = templates().get_template("page.j2")
    return page.render(
        title=title,
        heading=heading,
        subtitle=subtitle,
        fragments=[Markup(fragment) for fragment in fragments],
        sections=[section for section in sections if section[2]],
        style=style,
        script=code,
        # The content security policy allows only this script, by its hash, so fragments cannot run scripts.
        digest=base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "") -> Markup:
    """Render a table; the first cell of a row is its name, and the other cells get the CSS class `kind`."""
    return macros().table(heads, rows, kind) if rows else Markup()


def metric_table(columns: Mapping[str, Any], heads: Sequence[str] = ()) -> Markup:
    """Render a table with a column per evaluation (or run, or group) and a row per metric.

    Columns have `metrics` and `intervals`. Their titles are the keys of `columns`, or `heads` if given.
    """

    def cell(column: Any, name: str) -> str:
        if name not in column.metrics:
            return ""
        value, (low, high) = column.metrics[name], column.intervals.get(name, (math.nan, math.nan))
        number = spelled(value) if 0 < abs(value) < 1e-3 else f"{value:.3f}"
        number = f"{value:,.0f}" if abs(value) >= 1e4 else number
        return macros().with_small(number, f"{low:.3f} – {high:.3f}" if math.isfinite(low) else "")

    names = dict.fromkeys(name for column in columns.values() for name in column.metrics)
    rows = [[name, *(cell(column, name) for column in columns.values())] for name in names]
    return table(heads or ["", *columns], rows)


def breakable(name: str) -> Markup:
    """Allow line breaks after punctuation in a name, by HTML's <wbr>."""
    return Markup(re.sub(r"([/_.:=-])(?=\w)", r"\1<wbr>", str(escape(name))))


def amount(value: float, digits: int = 3) -> str:
    """Format a number with three significant digits and a suffix: k, M, G or T."""
    if not math.isfinite(value):
        return "–"
    value = float(f"{value:.{digits}g}")
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def spelled(value: float) -> str:
    """Format a number with three significant digits; a dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    if abs(value) < 1e-12:  # a rounding error instead of 0
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}" if abs(value) >= 1000 else f"{value:.{digits}f}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def duration(seconds: float) -> str:
    """Format a number of seconds as seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
