"""Charts as inline SVG, drawn with matplotlib: lines and stacked areas."""

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
BELOW, ZERO, ABOVE = (217, 98, 43), (207, 214, 221), (15, 111, 191)  # RGB of the scale `diverging`
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)))  # dash style of lines 1-8, 9-16, 17-24
# Size in points; about as wide as a phone screen in pixels, so that text isn't shrunk there.
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 60, 22, 16, 38  # margins; `chart` passes them to the page's script
AXES = (LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / HEIGHT)
POINTS = {"line": 240, "area": 40}  # maximum number of points of a line; see `binned`
BANDS = 8  # a chart with more lines shows no intervals
SMOOTHED = 40  # lines with at least this many points get a running mean
STYLE = Path(__file__).with_name("chart.mplstyle")


@dataclass(frozen=True)
class Line:
    """A named series of points in a chart."""

    label: str  # name in the legend
    x: Sequence[float]  # step of every point
    y: Sequence[float]  # NaN leaves a gap
    place: int = 0  # index that selects the colour and the dash style, see `style_of`
    band: Sequence[tuple[float, float]] = ()  # interval (low, high) of every point; empty: none

    @property
    def colour(self) -> str:
        """The colour of the line."""
        return style_of(self.place)[0]

    @property
    def dash(self) -> Any:
        """The dashes of the line."""
        return style_of(self.place)[1]


@contextmanager
def chart_style(salt: str = "mmrl") -> Iterator[None]:
    """Apply the chart style inside this context; ids in an SVG are hashes of its content and `salt`."""
    from matplotlib import style

    with style.context([STYLE, {"svg.hashsalt": salt}]):
        yield


def chart(lines: Sequence[Line], kind: Literal["line", "area"] = "line", *, unit: str = "") -> Markup:
    """Draw values over steps as SVG, with the unit above the chart and the legend below it.

    Args:
        lines: The lines; in an area chart they all have the same `x`.
        kind: `line`: separate lines. `area`: stacked areas, the first line at the bottom.
        unit: Unit of the values.
    """
    from matplotlib.figure import Figure

    lines = [binned(line, kind) for line in lines]
    with chart_style(salt=repr((unit, lines))):  # the salt makes ids unique on a page with several charts
        figure = Figure((WIDTH / 72, HEIGHT / 72), dpi=72)
        axes = figure.add_axes(AXES)
        axes.set_xlabel("step")
        axes.locator_params(nbins=5, steps=[1, 2, 5, 10])  # leaves out matplotlib's 2.5
        axes.locator_params(axis="x", integer=True)
        axes.margins(x=0, y=0.04)
        (draw_lines if kind == "line" else draw_areas)(axes, lines)
        if len(steps := {x for line in lines for x in line.x}) == 1:
            axes.set_xticks([*steps])  # a single step: no ticks at fractions of steps
        svg = svg_of(figure)

    # Points in JSON, from which the page's script shows the values at the cursor.
    points = [[[rounded(x) for x in line.x], [rounded(y) for y in line.y]] for line in lines]
    data = {"box": [LEFT, WIDTH - RIGHT, *map(float, axes.get_xlim())], "lines": points}
    legend = [(style_of(line.place)[0], line.label, finite(line.y)[-1]) for line in lines]
    size = {"width": WIDTH, "height": HEIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}
    return macros().chart(Markup(svg.partition(">")[2].removesuffix("</svg>\n")), size, data, unit, legend)


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw lines: with shaded intervals if there are few lines, and smoothed if they have many points."""
    for line in lines:
        colour, dash = style_of(line.place)
        if line.band and len(lines) <= BANDS:
            low, high = zip(*line.band, strict=True)
            axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
        if len(line.x) >= SMOOTHED:
            axes.plot(line.x, line.y, color=colour, linewidth=1, alpha=0.28)
        # Do not clip: the first and the last dot lie on the edges of the axes.
        dots = {"marker": "o", "markersize": 4.5, "clip_on": False, "markevery": dotted(line.y)}
        axes.plot(line.x, smooth(line.y), color=colour, linestyle=dash, linewidth=1.8, **dots)
    low, high = axes.dataLim.intervaly
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # constant up to rounding: draw it in the middle
        half = abs(low) / 2 or 0.5
        axes.set_ylim(low - half, high + half)
    elif low == 0:
        axes.set_ylim(bottom=0)


def draw_areas(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw lines over the same steps as stacked areas."""
    colours = [style_of(line.place)[0] for line in lines]
    x, heights = lines[0].x, [line.y for line in lines]
    if len(x) == 1:  # draw a single point one step wide, otherwise its area is empty
        x, heights = [x[0] - 0.5, x[0] + 0.5], [[*y, *y] for y in heights]
    axes.stackplot(x, heights, colors=colours, alpha=0.78, linewidth=0)


def style_of(place: int) -> tuple[str, Any]:
    """Return the colour and the dash style of the line with this index."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def svg_of(figure: Figure) -> str:
    """Convert a figure to a compact SVG element: no group ids, and coordinates with two decimals."""
    buffer = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    svg = buffer.getvalue()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Remove rotations by 0 degrees, and group ids, which are not unique on a page with several charts.
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg[svg.index("<svg") :])


def binned(line: Line, kind: str) -> Line:
    """Downsample a line with more points than this kind of chart shows: mean y and last x of each bin."""
    most, size = POINTS[kind], len(line.x)
    if size <= most:
        return line
    bins = list(pairwise(round(i * size / most) for i in range(most + 1)))
    band = [tuple(mean(bound[a:b]) for bound in zip(*line.band, strict=True)) for a, b in bins]
    points = {"x": [line.x[b - 1] for _, b in bins], "y": [mean(line.y[a:b]) for a, b in bins]}
    return replace(line, **points, band=band if line.band else ())


def smooth(values: Sequence[float]) -> Sequence[float]:
    """Compute a running mean over a window of 1/8 of the values; short series stay unchanged."""
    if len(values) < SMOOTHED:
        return values
    reach = len(values) // 16
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    pairs = zip(values, windows, strict=True)
    return [mean(window) if math.isfinite(value) else math.nan for value, window in pairs]


def finite(values: Sequence[float]) -> list[float]:
    """Return the finite values only."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Sequence[float]) -> float:
    """Average the finite values; NaN if there are none."""
    numbers = finite(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def dotted(values: Sequence[float]) -> list[int]:
    """Return the indices of the points to mark with dots: all (short line), or those between two gaps."""
    padded = [math.nan, *values, math.nan]
    alone = (not math.isfinite(padded[i]) and not math.isfinite(padded[i + 2]) for i in range(len(values)))
    return [i for i, lonely in enumerate(alone) if lonely or len(values) < 12]


def rounded(value: float) -> float | None:
    """Round a number for JSON to four significant digits; None if it is not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")


def diverging(value: float, most: float) -> str:
    """Mix a colour from orange (-`most`) through grey (0 or NaN) to blue (`most`).

    Unlike red and green, orange and blue are distinct for every kind of colour blindness.
    """
    share = max(-1.0, min(1.0, value / most)) if most and math.isfinite(value) else 0.0
    end = BELOW if share < 0 else ABOVE
    mixed = (round(a + abs(share) * (b - a)) for a, b in zip(ZERO, end, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
