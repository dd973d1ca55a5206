"""Figures of a comparison as files for a paper: one SVG and one CSV per metric."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from mmrl.reporting.html.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    chart_style,
    draw_lines,
    finite,
    svg_of,
)
from mmrl.reporting.html.curves import Runs, constants, line_of, metrics_by_panel

LEGEND = 17  # height of one legend line, in points


def export_figures(runs: Runs, folder: Path) -> list[Path]:
    """Write every metric that varies as `METRIC.svg` and `METRIC.csv`; return the SVG files.

    A CSV has one row per run (or group) and step: `run,step,value,low,high`.
    """
    panels = metrics_by_panel(runs)
    flat = constants(runs, [name for names in panels.values() for name in names])
    written: dict[str, Path] = {}
    for panel, names in panels.items():
        for name in (name for name in names if name not in flat):
            lines = [line_of(run, records, name, i) for i, (run, records) in enumerate(runs.items())]
            lines = [line for line in lines if finite(line.y)]
            stem = re.sub(r"[^\w.-]+", "_", name).strip("._")[:100] or "metric"
            while stem.lower() in written:
                stem += "_"
            path = written[stem.lower()] = folder / f"{stem}.svg"
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(figure_of(name, panel.unit, lines), encoding="utf-8")
            write_csv(path.with_suffix(".csv"), lines)
    return list(written.values())


def figure_of(title: str, unit: str, lines: Sequence[Line]) -> str:
    """Draw lines as a standalone SVG with title, axis labels and legend."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    legend = LEGEND * len(lines)
    height = HEIGHT + TOP + legend
    with chart_style(salt=repr((title, lines))), rc_context({"text.parse_math": False}):
        figure = Figure((WIDTH / 72, height / 72), dpi=72)
        size = ((WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / height)
        axes = figure.add_axes((LEFT / WIDTH, (BOTTOM + legend) / height, *size))
        draw_lines(axes, lines)
        axes.set(xlabel="step", ylabel=unit, title=printable(title))
        axes.locator_params(axis="x", integer=True)
        handles = [axes.plot([], [], color=line.colour, linestyle=line.dash)[0] for line in lines]
        # Set label texts afterwards: matplotlib leaves out labels that begin with an underscore.
        drawn = figure.legend(handles, [str(i) for i in range(len(lines))], loc="lower left", frameon=False)
        for text, line in zip(drawn.get_texts(), lines, strict=True):
            text.set_text(printable(line.label))
        return svg_of(figure)


def printable(text: str) -> str:
    """Replace control characters, which XML does not allow."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_csv(path: Path, lines: Sequence[Line]) -> None:
    """Write the points of lines with their interval bounds; empty cells if there are none."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "value", "low", "high"])
        for line in lines:
            bands = line.band or [("", "")] * len(line.x)
            for x, y, (low, high) in zip(line.x, line.y, bands, strict=True):
                writer.writerow([line.label, x, y, low, high])
