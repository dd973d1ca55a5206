"""One self-contained HTML page of a run: what was measured, how it went, and pictures of what the model
did."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.table import Measured

# Each panel shows the metrics whose names begin so; a panel without any is left out.
PANELS = (
    ("reward", ("reward", "eval_reward")),
    ("rewards by name", ("rewards/",)),
    ("held-out metrics", ("eval_",)),
    ("divergence from the reference", ("kl",)),
    ("entropy", ("entropy",)),
    ("answer length", ("completions/mean_length", "completions/max_length")),
    ("spread inside groups", ("reward_std", "frac_reward_zero_std", "frac_groups_kept")),
    ("loss and gradient", ("loss", "grad_norm")),
    ("clipped steps", ("clip_ratio/",)),
    ("gap to the engine", ("sampling/",)),
    ("seconds a step", ("time/", "step_time")),
)


def write_page(
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    measured: Measured | None,
    exhibits: Sequence[str],
    alarms: Sequence[str] = (),
) -> Path:
    """Write `report.html` from the journal of a run, its last evaluation, fragments of HTML made by exhibits
    and what alarms said."""
    sections = [f"<h1>{html.escape(folder.name)}</h1>", f"<p class=note>{len(records)} steps reported</p>"]
    if alarms:
        said = "".join(f"<li>{html.escape(text)}</li>" for text in alarms)
        sections.append(f"<section class=alarms role=alert><h2>Alarms</h2><ul>{said}</ul></section>")
    if measured:
        sections.append("<h2>Held out</h2>" + metric_table({"value": measured}))
    sections += exhibits
    sections.append("<h2>Curves</h2><div class=grid>" + "".join(curves({folder.name: records})) + "</div>")
    config = folder / "config.yaml"
    if config.exists():
        sections.append(f"<h2>Configuration</h2><pre>{html.escape(config.read_text())}</pre>")
    path = folder / "report.html"
    path.write_text(document(folder.name, sections))
    return path


def metric_table(columns: Mapping[str, Measured]) -> str:
    """Lay evaluations side by side, one row a metric, with their intervals."""
    names = dict.fromkeys(name for measured in columns.values() for name in measured.metrics)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in columns)
    rows = []
    for name in names:
        cells = "".join(f"<td>{_with_interval(measured, name)}</td>" for measured in columns.values())
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f"<div class=wide><table><tr><th></th>{head}</tr>{''.join(rows)}</table></div>"


def _with_interval(measured: Measured, name: str) -> str:
    if name not in measured.metrics:
        return ""
    low, high = measured.intervals.get(name, (math.nan, math.nan))
    spread = f" <small>{low:.3f} – {high:.3f}</small>" if math.isfinite(low) else ""
    return f"{measured.metrics[name]:.3f}{spread}"


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Draw a panel for every kind of metric that the runs reported, as inline SVG."""
    figures = []
    for title, prefixes in PANELS:
        names = sorted(
            {
                name
                for records in runs.values()
                for record in records
                for name in record
                if any(name == p or (p[-1] in "/_" or p == "kl") and name.startswith(p) for p in prefixes)
                and not name.endswith(("/low", "/high"))  # ends of intervals
            }
        )
        series = [
            (name if len(runs) == 1 else f"{run} · {name}", *_points(records, name))
            for run, records in runs.items()
            for name in names
        ]
        series = [(label, x, y) for label, x, y in series if y]
        if series:
            figures.append(f"<figure><figcaption>{title}</figcaption>{_plot(series)}</figure>")
    return figures


def _points(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [
        (record["step"] + 1, record[name]) for record in records if math.isfinite(record.get(name, math.nan))
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _plot(series: Sequence[tuple[str, list[int], list[float]]]) -> str:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(
        {
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": "mmrl",
        }
    ):
        figure, axes = pyplot.subplots(figsize=(4.6, 2.6), layout="constrained")
        for label, x, y in series[:10]:
            marks = {"marker": "o", "markersize": 3} if len(x) < 12 else {}
            axes.plot(x, y, linewidth=1.4, label=label, **marks)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        if len(series) > 1:
            axes.legend(fontsize=7, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def document(title: str, sections: Sequence[str]) -> str:
    """Put fragments into a page that needs nothing but itself."""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><main>{''.join(sections)}</main></html>"
    )


STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #5b6b7b; --line: #dde3ea; --accent: #0f6fbf; }
body { margin: 0; background: #f6f8fa; color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 26px; margin: 8px 0 0; } h2 { font-size: 19px; margin: 36px 0 12px; }
.alarms { background: #fff4e5; border: 2px solid #d9822b; border-radius: 8px; padding: 4px 16px; }
.alarms { margin: 16px 0; }
.alarms h2 { margin: 8px 0 0; } .alarms ul { margin: 8px 0; padding-left: 20px; }
.note, small { color: var(--soft); } small { font-size: 12px; white-space: nowrap; }
.wide { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 14px; border-bottom: 1px solid var(--line); font-weight: 400; }
tr:first-child th { color: var(--soft); } tr:last-child > * { border-bottom: 0; } .best { font-weight: 700; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 14px; }
figure, pre { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
figure, pre { overflow-x: auto; }
figcaption { font-weight: 600; margin-bottom: 6px; } figure svg { width: 100%; height: auto; }
figure .frames { display: flex; gap: 2px; }
figure .frames img { flex: 1 1 0; min-width: 0; width: 100%; display: block; }
.rows { display: grid; gap: 14px; }
pre { font-size: 12.5px; }
"""
