"""Charts as inline SVG that a small script lets one read off: lines, stacked areas, and one number against
another."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

COLOURS = ("#0f6fbf", "#d9622b", "#2b8a3e", "#8447b8", "#b8860b", "#0b8a8f", "#c2255c", "#5b6b7b")
DASHES = ("", "7 4", "2 3")  # of every next eight lines
WIDTH, HEIGHT = (
    360,
    216,
)  # units, near the pixels that a chart takes on a phone, so that its letters stay legible
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 32
POINTS = 240  # more are averaged in bins
AREAS = 40  # the same, of stacked areas
BANDS = 3  # of more lines, the intervals would lie over each other
SMOOTHED = 40  # points, from which on a mean over a window is drawn in front of them


@dataclass(frozen=True)
class Line:
    """Points by x, with a name. A `place` keeps the colour of a line the same over several charts; a `band`
    holds the ends of an interval for every point."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    place: int | None = None
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class _Frame:
    """Where numbers fall in a chart."""

    x: tuple[float, float]
    y: tuple[float, float]

    def holds(self, x: float, y: float) -> bool:
        return self.x[0] <= x <= self.x[1] and self.y[0] <= y <= self.y[1]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def line_chart(lines: Sequence[Line], *, unit: str = "", x_label: str = "step") -> str:
    """Draw lines over steps. Of many points a mean over a window stands in front of the points themselves."""
    lines = [_thinned(line) for line in lines]
    ends = [end for line in lines for both in line.band for end in both if len(lines) <= BANDS]
    frame = _framed([x for line in lines for x in line.x], [y for line in lines for y in line.y] + ends)
    marks = []
    for i, line in enumerate(lines):
        colour, dash = style_of(i if line.place is None else line.place)
        if len(lines) <= BANDS:
            marks.append(_band(frame, line, colour))
        many = len(line.x) >= SMOOTHED
        if many:
            marks.append(_path(frame, line.x, line.y, f"stroke='{colour}' stroke-width='1' opacity='.28'"))
        drawn = _smooth(line.y) if many else line.y
        marks.append(_path(frame, line.x, drawn, f"stroke='{colour}' stroke-width='1.8'{dash}"))
        if len(line.x) < 12:
            marks += [_dot(frame, x, y, colour) for x, y in zip(line.x, line.y, strict=True)]
    return _figure_of(frame, marks, x_label, unit, _data(frame, lines)) + _legend(lines)


def area_chart(lines: Sequence[Line], *, unit: str = "", x_label: str = "step") -> str:
    """Stack lines of the same steps as areas, the first at the bottom."""
    lines = [_thinned(line, AREAS) for line in lines]
    tops = [list(line.y) for line in lines]
    for below, above in pairwise(tops):
        above[:] = [a + b for a, b in zip(below, above, strict=True)]
    frame = _framed(lines[0].x, [0.0, *tops[-1]])
    marks, floor = [], [0.0] * len(lines[0].x)
    for i, (line, top) in enumerate(zip(lines, tops, strict=True)):
        colour = style_of(i if line.place is None else line.place)[0]
        marks.append(_area(frame, line.x, floor, top, colour, 0.78))
        floor = top
    return _figure_of(frame, marks, x_label, unit, _data(frame, lines)) + _legend(lines)


def frontier_chart(lines: Sequence[Line], *, x_label: str, unit: str) -> str:
    """Draw the way of runs through two numbers: each line begins at a ring and ends at a full dot."""
    lines = [_thinned(line, together=True) for line in lines]
    ways = [
        [_smooth(values) if len(line.x) >= SMOOTHED else list(values) for values in (line.x, line.y)]
        for line in lines
    ]
    # Single steps may lie far out; the picture is as large as the ways are.
    frame = _framed([v for x, _ in ways for v in x], [v for _, y in ways for v in y], 0.15)
    marks = []
    for i, (line, (x, y)) in enumerate(zip(lines, ways, strict=True)):
        colour, dash = style_of(i if line.place is None else line.place)
        points = [point for point in zip(line.x, line.y, strict=True) if frame.holds(*point)]
        marks += [_dot(frame, *point, colour, 1.6, ".35") for point in points]
        marks.append(_path(frame, x, y, f"stroke='{colour}' stroke-width='1.6'{dash}"))
        marks += [_dot(frame, x[0], y[0], colour, 4.5, ring=True), _dot(frame, x[-1], y[-1], colour, 4.5)]
    return _figure_of(frame, marks, x_label, unit, "") + _legend(lines, values=False)


def bars(rows: Mapping[str, Mapping[str, float]], *, unit: str) -> str:
    """Draw one stacked bar a row, all to one scale, with the numbers beside their colours below."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    drawn = []
    for title, parts in rows.items():
        cells = "".join(
            f"<i style='width:{100 * value / longest:.2f}%;background:{style_of(names.index(name))[0]}' "
            f"title='{html.escape(name)}: {spelled(value)} {unit}'></i>"
            for name, value in parts.items()
        )
        total = f"{spelled(sum(parts.values()))} {unit}"
        drawn.append(
            f"<div class=bar><b>{html.escape(title)}</b><span>{cells}</span><small>{total}</small></div>"
        )
    keys = "".join(
        f"<li><i style='background:{style_of(i)[0]}'></i>{html.escape(name)}</li>"
        for i, name in enumerate(names)
    )
    return f"<div class=bars>{''.join(drawn)}</div><ul class=legend>{keys}</ul>"


def spelled(value: float) -> str:
    """Write a number with three digits, as people read it."""
    if not math.isfinite(value):
        return "–"
    if abs(value) < 1e-12:  # what is left of sums that cancel
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}" if abs(value) >= 1000 else f"{value:.{digits}f}"
    return _powered(f"{value:.1e}")


def style_of(place: int) -> tuple[str, str]:
    """Choose the colour and the dashes of a line."""
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    return COLOURS[place % len(COLOURS)], f" stroke-dasharray='{dash}'" if dash else ""


# ---- parts of a chart


def _framed(x: Sequence[float], y: Sequence[float], margin: float = 0.0) -> _Frame:
    return _Frame(_spread(x, margin), _spread(y, margin or 0.04))


def _spread(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    reach = high - low
    if reach <= 1e-12 * max(abs(low), abs(high)) or reach == 0:
        half = abs(low) / 2 or 0.5
        return low - half, high + half
    # Numbers that begin at 0 stand on the axis.
    lower = low if low == 0 else low - margin * reach
    return lower, high + margin * reach


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Find round numbers between two, `most` at most, and write each with as many digits as tell them
    apart."""
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [i * step for i in range(first, last + 1)]
    largest = max((abs(value) for value in values), default=0.0)
    # Where the last digit of the step stands behind the point.
    digits = -math.floor(math.log10(step) + 1e-9) + (abs(step / size - 2.5) < 1e-9)
    if (largest < 1e5 and digits <= 4) or not largest:
        return [(value, f"{value + 0.0:.{max(0, digits)}f}") for value in values]
    kept = max(0, math.floor(math.log10(largest)) + digits)
    return [(value, _powered(f"{value:.{kept}e}") if value else "0") for value in values]


def _powered(written: str) -> str:
    return written.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _figure_of(frame: _Frame, marks: Sequence[str], x_label: str, y_label: str, data: str) -> str:
    axes = []
    for value, words in ticks(*frame.y, 5):
        _, y = frame.at(frame.x[0], value)
        axes.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        axes.append(f"<text x='{LEFT - 6}' y='{y + 3.5:.1f}' text-anchor='end'>{words}</text>")
    for value, words in ticks(*frame.x, 5):
        if x_label == "step":
            if value != round(value):
                continue
            words = f"{value:.0f}"
        x, _ = frame.at(value, frame.y[0])
        # The outermost numbers stand inside the picture.
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        axes.append(f"<text x='{x:.1f}' y='{HEIGHT - BOTTOM + 14}' text-anchor='{anchor}'>{words}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    axes.append(
        f"<text class=axis x='{middle}' y='{HEIGHT - 3}' text-anchor='middle'>{html.escape(x_label)}</text>"
    )
    unit = f"<small class=unit>{html.escape(y_label)}</small>" if y_label else ""
    return (
        f"{unit}<svg role=img viewBox='0 0 {WIDTH} {HEIGHT}'{data}><g class=axes>{''.join(axes)}</g>"
        f"{''.join(marks)}<line class=cursor y1='{TOP}' y2='{HEIGHT - BOTTOM}'/></svg>"
    )


def _path(frame: _Frame, x: Sequence[float], y: Sequence[float], style: str) -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(frame.at, x, y))
    return f"<path d='M{points}' fill='none' stroke-linejoin='round' {style}/>"


def _area(
    frame: _Frame,
    x: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    colour: str,
    opacity: float,
) -> str:
    way = [*zip(x, high, strict=True), *reversed(list(zip(x, low, strict=True)))]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (frame.at(*point) for point in way))
    return f"<polygon points='{points}' fill='{colour}' fill-opacity='{opacity}'/>"


def _band(frame: _Frame, line: Line, colour: str) -> str:
    """Shade where the intervals of a line lie."""
    if not line.band:
        return ""
    return _area(frame, line.x, [low for low, _ in line.band], [high for _, high in line.band], colour, 0.13)


def _dot(
    frame: _Frame,
    x: float,
    y: float,
    colour: str,
    radius: float = 2.4,
    opacity: str = "1",
    ring: bool = False,
) -> str:
    a, b = frame.at(x, y)
    fill = f"fill='#fff' stroke='{colour}' stroke-width='2'" if ring else f"fill='{colour}'"
    return f"<circle cx='{a:.1f}' cy='{b:.1f}' r='{radius}' {fill} opacity='{opacity}'/>"


def _legend(lines: Sequence[Line], values: bool = True) -> str:
    """Name the lines with their last values, which the script replaces while one points at the chart."""
    items = []
    for i, line in enumerate(lines):
        colour = style_of(i if line.place is None else line.place)[0]
        last = f"<output>{spelled(line.y[-1])}</output>" if values else ""
        items.append(f"<li><i style='background:{colour}'></i>{html.escape(line.label)} {last}</li>")
    return f"<ul class=legend>{''.join(items)}</ul>"


def _data(frame: _Frame, lines: Sequence[Line]) -> str:
    """Write the points down for the script."""
    told: dict[str, Any] = {
        "box": [LEFT, WIDTH - RIGHT, *frame.x],
        "lines": [[[_short(v) for v in line.x], [_short(v) for v in line.y]] for line in lines],
    }
    written = json.dumps(told, separators=(",", ":"))
    return f" data-points='{written}'"


def _short(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.4g}")


def _thinned(line: Line, most: int = POINTS, together: bool = False) -> Line:
    """Average points in bins where there are more than `most`; with `together` both of their numbers."""
    if len(line.x) <= most:
        return line
    bins = list(pairwise(round(i * len(line.x) / most) for i in range(most + 1)))
    y = [sum(line.y[a:b]) / (b - a) for a, b in bins]
    x = [sum(line.x[a:b]) / (b - a) if together else line.x[b - 1] for a, b in bins]
    return Line(line.label, x, y, line.place)


def _smooth(values: Sequence[float]) -> list[float]:
    """Average over a window of an eighth of the points, shorter at the ends."""
    reach = max(1, len(values) // 16)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
