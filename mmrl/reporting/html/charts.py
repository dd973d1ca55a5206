"""Charts as inline SVG, drawn with matplotlib: lines, stacked areas, and one metric against another."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from mmrl.reporting.html.layout import macros

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0f6fbf", "#d9622b", "#2b8a3e", "#8447b8", "#b8860b", "#0b8a8f", "#c2255c", "#5b6b7b")
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))  # of every next eight lines
# In points, near the pixels that a chart takes on a phone, so that its letters stay legible.
WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 14, 32  # fixed margins, so that the script knows where the axes are
AXES = (LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / HEIGHT)
POINTS = {"line": 240, "path": 240, "area": 40}  # longer lines are averaged in bins
BANDS = 3  # with more lines than this, the intervals would cover each other
SMOOTHED = 40  # lines of this many points or more get a running mean drawn over them
STYLE = Path(__file__).with_name("chart.mplstyle")


@dataclass(frozen=True)
class Line:
    """A named series of points."""

    label: str  # in the legend
    x: Sequence[float]  # step or other abscissa of every point
    y: Sequence[float]
    place: int = 0  # index of colour and dashes, so that a run keeps them over several charts
    band: Sequence[tuple[float, float]] = ()  # ends (low, high) of an interval for every point, or nothing


@contextmanager
def chart_style(salt: str = "mmrl") -> Iterator[None]:
    """Draw charts in the style of pages; ids inside an SVG are hashes of its content and of `salt`."""
    from matplotlib import style

    with style.context([STYLE, {"svg.hashsalt": salt}]):
        yield


def chart(
    lines: Sequence[Line],
    kind: Literal["line", "area", "path"] = "line",
    *,
    unit: str = "",
    x_label: str = "step",
) -> Markup:
    """Draw a chart with its unit above and its legend below.

    Args:
        lines: What is drawn; those of an area chart have the same `x`.
        kind: `line`: values over steps. `area`: stacked, the first at the bottom. `path`: two numbers against
            each other, from a ring at the start to a full dot at the end.
        unit: Unit of the values.
        x_label: Title of the x axis; steps are whole numbers.
    """
    from matplotlib.figure import Figure

    lines = [binned(line, kind) for line in lines]
    with chart_style(salt=repr((unit, lines))):  # no id of another chart of the page
        figure = Figure((WIDTH / 72, HEIGHT / 72), dpi=72)
        axes = figure.add_axes(AXES)
        axes.set_xlabel(x_label)
        axes.locator_params(nbins=5, steps=[1, 2, 2.5, 5, 10])
        axes.locator_params(axis="x", integer=x_label == "step")
        {"line": draw_lines, "area": draw_areas, "path": draw_paths}[kind](axes, lines)
        svg = svg_of(figure)
    over_steps = kind != "path"

    def short(values: Sequence[float]) -> list[float]:
        return [int(value) if value == int(value) else float(f"{value:.4g}") for value in values]

    # The page's script reads the values at a step off these points.
    points = [[short(line.x), short(line.y)] for line in lines]
    data = {"box": [LEFT, WIDTH - RIGHT, *map(float, axes.get_xlim())], "lines": points} if over_steps else {}
    legend = [(style_of(line.place)[0], line.label, line.y[-1] if over_steps else None) for line in lines]
    size = {"width": WIDTH, "height": HEIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}
    return macros().chart(Markup(svg.partition(">")[2].removesuffix("</svg>\n")), size, data, unit, legend)


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw lines over steps: of few lines the intervals, of many points a running mean over faint points."""
    axes.margins(x=0, y=0.04)
    for line in lines:
        colour, dash = style_of(line.place)
        if line.band and len(lines) <= BANDS:
            low, high = zip(*line.band, strict=True)
            axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
        if len(line.x) >= SMOOTHED:
            axes.plot(line.x, line.y, color=colour, linewidth=1, alpha=0.28)
        dots = {"marker": "o", "markersize": 4.5} if len(line.x) < 12 else {}
        axes.plot(line.x, smooth(line.y), color=colour, linestyle=dash, linewidth=1.8, **dots)
    low, high = axes.dataLim.intervaly
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # constant but for rounding: in the middle
        half = abs(low) / 2 or 0.5
        axes.set_ylim(low - half, high + half)
    elif low == 0:
        axes.set_ylim(bottom=0)  # numbers that begin at 0 start on the axis


def draw_areas(axes: Axes, lines: Sequence[Line]) -> None:
    """Stack lines over the same steps."""
    axes.margins(x=0, y=0.04)
    colours = [style_of(line.place)[0] for line in lines]
    axes.stackplot(lines[0].x, [line.y for line in lines], colors=colours, alpha=0.78, linewidth=0)


def draw_paths(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw smoothed paths through two numbers, and the single points among them."""
    axes.margins(0.15)
    for line in lines:
        colour, dash = style_of(line.place)
        x, y = smooth(line.x), smooth(line.y)
        axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.6)
        ring = {"markerfacecolor": "#ffffff", "markeredgewidth": 2}
        axes.plot(x[:1], y[:1], "o", color=colour, markersize=8, **ring)
        axes.plot(x[-1:], y[-1:], "o", color=colour, markersize=8)
    # Single steps may lie far out, so the smoothed paths set the limits and points beyond them are left out.
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for line in lines:
        points = zip(line.x, line.y, strict=True)
        inside = [(x, y) for x, y in points if left <= x <= right and bottom <= y <= top]
        faint = {"alpha": 0.35, "zorder": 1, "markeredgewidth": 0, "color": style_of(line.place)[0]}
        axes.plot([x for x, _ in inside], [y for _, y in inside], ".", **faint)
    axes.set(xlim=(left, right), ylim=(bottom, top))


def style_of(place: int) -> tuple[str, Any]:
    """Choose the colour and the dashes of a line by its index."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def svg_of(figure: Figure) -> str:
    """Write a figure as one small SVG element: without group ids, coordinates with two digits."""
    buffer = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    svg = buffer.getvalue()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Group ids would occur again in the next chart of the page; a turn by 0 degrees says nothing.
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg[svg.index("<svg") :])


def binned(line: Line, kind: str) -> Line:
    """Average a long line in bins; a bin over steps lies at its last step, one of a path at its mean."""
    most, size = POINTS[kind], len(line.x)
    if size <= most:
        return line
    bins = list(pairwise(round(i * size / most) for i in range(most + 1)))
    y = [sum(line.y[a:b]) / (b - a) for a, b in bins]
    x = [sum(line.x[a:b]) / (b - a) if kind == "path" else line.x[b - 1] for a, b in bins]
    return replace(line, x=x, y=y, band=())


def smooth(values: Sequence[float]) -> Sequence[float]:
    """Average many values over a window of an eighth of them, shorter at the ends; keep few as they are."""
    if len(values) < SMOOTHED:
        return values
    reach = len(values) // 16
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
