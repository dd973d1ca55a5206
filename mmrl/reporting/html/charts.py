"""Charts as inline SVG, drawn with matplotlib: lines, stacked areas, and one metric against another."""

from __future__ import annotations

import io
import math
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
BELOW, ZERO, ABOVE = (217, 98, 43), (207, 214, 221), (15, 111, 191)  # of `diverging`
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))  # of every next eight lines
# In points, near the pixels that a chart takes on a phone, so that its letters stay legible.
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 60, 22, 16, 38  # fixed margins, so that the script knows where the axes are
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
    y: Sequence[float]  # NaN leaves a gap
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
        axes.locator_params(nbins=5, steps=[1, 2, 5, 10])  # a quarter would need a digit more
        axes.locator_params(axis="x", integer=x_label == "step")
        {"line": draw_lines, "area": draw_areas, "path": draw_paths}[kind](axes, lines)
        over_steps = kind != "path"
        if over_steps and len(steps := {x for line in lines for x in line.x}) == 1:
            axes.set_xticks([*steps])  # instead of fractions around it
        svg = svg_of(figure)

    # The page's script reads the values at a step off these points.
    points = [[[rounded(x) for x in line.x], [rounded(y) for y in line.y]] for line in lines]
    data = {"box": [LEFT, WIDTH - RIGHT, *map(float, axes.get_xlim())], "lines": points} if over_steps else {}
    ends = [finite(line.y)[-1] if over_steps else None for line in lines]
    legend = [(style_of(line.place)[0], line.label, end) for line, end in zip(lines, ends, strict=True)]
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
        # Not clipped, since the first and the last dot lie on the edges of the axes.
        dots = {"marker": "o", "markersize": 4.5, "clip_on": False, "markevery": dotted(line.y)}
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
    x, heights = lines[0].x, [line.y for line in lines]
    if len(x) == 1:  # as wide as a step, since an area between a point and itself is empty
        x, heights = [x[0] - 0.5, x[0] + 0.5], [[*y, *y] for y in heights]
    axes.stackplot(x, heights, colors=colours, alpha=0.78, linewidth=0)


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
    y = [mean(line.y[a:b]) for a, b in bins]
    x = [mean(line.x[a:b]) if kind == "path" else line.x[b - 1] for a, b in bins]
    return replace(line, x=x, y=y, band=())


def smooth(values: Sequence[float]) -> Sequence[float]:
    """Average many values over a window of an eighth of them, shorter at the ends; keep few as they are."""
    if len(values) < SMOOTHED:
        return values
    reach = len(values) // 16
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    pairs = zip(values, windows, strict=True)
    return [mean(window) if math.isfinite(value) else math.nan for value, window in pairs]


def finite(values: Sequence[float]) -> list[float]:
    """Leave out values that are not finite."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Sequence[float]) -> float:
    """Average the finite values; NaN if there are none."""
    known = finite(values)
    return sum(known) / len(known) if known else math.nan


def dotted(values: Sequence[float]) -> list[int]:
    """List the points that get a dot: all of a short line, else those alone between two gaps."""
    padded = [math.nan, *values, math.nan]
    alone = (not math.isfinite(padded[i]) and not math.isfinite(padded[i + 2]) for i in range(len(values)))
    return [i for i, lonely in enumerate(alone) if lonely or len(values) < 12]


def rounded(value: float) -> float | None:
    """Round a number for JSON to four significant digits; one that is not finite becomes null."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")


def diverging(value: float, most: float) -> str:
    """Choose a colour from orange (-`most`) over grey (0, or not a number) to blue (`most`).

    Orange and blue differ for every kind of colour blindness, as green and red do not.
    """
    share = max(-1.0, min(1.0, value / most)) if most and math.isfinite(value) else 0.0
    end = BELOW if share < 0 else ABOVE
    mixed = (round(a + abs(share) * (b - a)) for a, b in zip(ZERO, end, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
