"""Charts as inline SVG, drawn with matplotlib: lines, stacked areas, and one metric against another."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mmrl.reporting.html.page import macros

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0f6fbf", "#d9622b", "#2b8a3e", "#8447b8", "#b8860b", "#0b8a8f", "#c2255c", "#5b6b7b")
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))  # of every next eight lines
# In points, near the pixels that a chart takes on a phone, so that its letters stay legible.
WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 14, 32  # fixed margins, so that the script knows where the axes are
POINTS = 240  # longer lines are averaged in bins
AREAS = 40  # the same, of stacked areas
BANDS = 3  # with more lines than this, the intervals would cover each other
SMOOTHED = 40  # lines of this many points or more get a running mean drawn over them
STYLE = {
    "svg.fonttype": "none",  # letters stay text: small, searchable, in the reader's size
    "svg.hashsalt": "mmrl",  # the same chart is the same file
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,  # names come from files; a $ in one is no formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a97a5",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


@dataclass(frozen=True)
class Line:
    """A named series of points.

    Args:
        label: Name in the legend.
        x: Step or other abscissa of every point.
        y: Value of every point.
        place: Index of colour and dashes, to keep them the same over several charts; by default the line's
            index in its chart.
        band: Ends (low, high) of an interval for every point, or nothing.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    place: int | None = None
    band: Sequence[tuple[float, float]] = ()


@contextmanager
def chart_style() -> Iterator[None]:
    """Set matplotlib's options for a page while charts are drawn."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


@chart_style()
def line_chart(lines: Sequence[Line], *, unit: str = "", x_label: str = "step") -> Markup:
    """Draw lines over steps; lines of many points get a running mean over the faint points themselves."""
    lines = _prepared(lines)
    figure, axes = _canvas(x_label)
    for line in lines:
        colour, dash = style_of(line.place)
        if line.band and len(lines) <= BANDS:
            low, high = zip(*line.band, strict=True)
            axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
        many = len(line.x) >= SMOOTHED
        if many:
            axes.plot(line.x, line.y, color=colour, linewidth=1, alpha=0.28)
        shown = _smooth(line.y) if many else line.y
        dots = {"marker": "o", "markersize": 4.5} if len(line.x) < 12 else {}
        axes.plot(line.x, shown, color=colour, linestyle=dash, linewidth=1.8, **dots)
    low, high = axes.dataLim.intervaly
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # constant but for rounding: in the middle
        half = abs(low) / 2 or 0.5
        axes.set_ylim(low - half, high + half)
    elif low == 0:
        axes.set_ylim(bottom=0)  # numbers that begin at 0 start on the axis
    return _finished(figure, axes, lines, unit)


@chart_style()
def area_chart(lines: Sequence[Line], *, unit: str = "", x_label: str = "step") -> Markup:
    """Stack lines over the same steps as areas, the first at the bottom."""
    lines = _prepared(lines, AREAS)
    figure, axes = _canvas(x_label)
    colours = [style_of(line.place)[0] for line in lines]
    axes.stackplot(lines[0].x, [line.y for line in lines], colors=colours, alpha=0.78, linewidth=0)
    return _finished(figure, axes, lines, unit)


@chart_style()
def frontier_chart(lines: Sequence[Line], *, x_label: str, unit: str) -> Markup:
    """Draw the path of runs through two numbers: each begins at a ring and ends at a full dot."""
    lines = _prepared(lines, together=True)
    figure, axes = _canvas(x_label)
    axes.margins(0.15)
    for line in lines:
        colour, dash = style_of(line.place)
        x, y = [_smooth(v) if len(v) >= SMOOTHED else list(v) for v in (line.x, line.y)]
        axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.6)
        ring = {"markerfacecolor": "#ffffff", "markeredgewidth": 2}
        axes.plot(x[:1], y[:1], "o", color=colour, markersize=8, **ring)
        axes.plot(x[-1:], y[-1:], "o", color=colour, markersize=8)
    # Single steps may lie far out: the axes show the smoothed paths, and only the points among them.
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    faint = {"alpha": 0.35, "zorder": 1, "markeredgewidth": 0}
    for line in lines:
        points = zip(line.x, line.y, strict=True)
        inside = [(x, y) for x, y in points if left <= x <= right and bottom <= y <= top]
        x, y = [x for x, _ in inside], [y for _, y in inside]
        axes.plot(x, y, ".", color=style_of(line.place)[0], **faint)
    axes.set(xlim=(left, right), ylim=(bottom, top))
    return _finished(figure, axes, lines, unit, readable=False)


def spelled(value: float) -> str:
    """Write a number with three significant digits; what is not finite becomes a dash."""
    if not math.isfinite(value):
        return "–"
    if abs(value) < 1e-12:  # what is left of sums that cancel
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}" if abs(value) >= 1000 else f"{value:.{digits}f}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def style_of(place: int | None) -> tuple[str, Any]:
    """Choose the colour and the dashes of a line by its index."""
    place = place or 0
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def svg_of(figure: Figure) -> str:
    """Write a figure as one small SVG element: without group ids, coordinates with two digits."""
    buffer = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    svg = buffer.getvalue()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg[svg.index("<svg") :])


# ---- parts of a chart


def _canvas(x_label: str) -> tuple[Figure, Axes]:
    """Make a figure of fixed margins with round ticks; steps are whole numbers."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure((WIDTH / 72, HEIGHT / 72), dpi=72)
    across, up = (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / HEIGHT
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / HEIGHT, across, up))
    axes.set_xlabel(x_label)
    axes.margins(x=0, y=0.04)
    steps = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=steps, integer=x_label == "step"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=steps))
    return figure, axes


def _finished(figure: Figure, axes: Axes, lines: Sequence[Line], unit: str, readable: bool = True) -> Markup:
    """Put the SVG under its unit and over its legend; `readable` hands the points to the page's script."""
    import matplotlib

    data: dict[str, Any] = {}
    if readable:
        points = [[[_short(v) for v in line.x], [_short(v) for v in line.y]] for line in lines]
        data = {"box": [LEFT, WIDTH - RIGHT, *map(float, axes.get_xlim())], "lines": points}
    # Ids inside an SVG are hashes of their content; the salt keeps those of different charts apart.
    matplotlib.rcParams["svg.hashsalt"] = repr((unit, lines))
    inside = svg_of(figure).partition(">")[2]
    legend = [
        (style_of(line.place)[0], line.label, spelled(line.y[-1]) if readable else None) for line in lines
    ]
    size = {"width": WIDTH, "height": HEIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}
    return macros().chart(Markup(inside.removesuffix("</svg>\n")), size, data, unit, legend)


def _short(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.4g}")


def _prepared(lines: Sequence[Line], most: int = POINTS, together: bool = False) -> list[Line]:
    """Give lines their places, and average in bins where there are more than `most` points.

    A bin of a line over steps lies at its last step; with `together` both numbers are averaged.
    """
    prepared = []
    for i, line in enumerate(lines):
        line = replace(line, place=i if line.place is None else line.place)
        if len(line.x) > most:
            bins = list(pairwise(round(i * len(line.x) / most) for i in range(most + 1)))
            y = [sum(line.y[a:b]) / (b - a) for a, b in bins]
            x = [sum(line.x[a:b]) / (b - a) if together else line.x[b - 1] for a, b in bins]
            line = replace(line, x=x, y=y, band=())
        prepared.append(line)
    return prepared


def _smooth(values: Sequence[float]) -> list[float]:
    """Average over a window of an eighth of the points, shorter at the ends."""
    reach = max(1, len(values) // 16)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
