"""Labels of points in a plot, placed so that they cover neither points nor each other."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top

SIZE, LINE = 11.0, 14.0  # of letters and of a line, pixels
LETTERS = 26  # longer names are broken into lines
GRID = 3.0  # pixels between the places that are tried
SAME = 5.0  # points closer than this in x and y share a label
FAR = 14.0  # a label farther from its point than this gets a line to it


def label_points(axes: Axes, names: Sequence[str], points: Sequence[Point], taken: Sequence[Box]) -> None:
    """Write names beside points, a name a line where points coincide; the limits of the axes must be final.

    `points` and `taken`, the boxes that labels avoid, are in pixels from the lower left of the figure.
    """
    from matplotlib.transforms import IdentityTransform

    groups: dict[Point, list[str]] = {}
    for name, (x, y) in zip(names, points, strict=True):
        near = (p for p in groups if abs(p[0] - x) < SAME and abs(p[1] - y) < SAME)
        groups.setdefault(next(near, (x, y)), []).extend(textwrap.wrap(name, LETTERS) or [name])
    sizes = [(max(map(text_width, lines)), LINE * len(lines)) for lines in groups.values()]
    inside, whole = axes.get_window_extent(), axes.figure.bbox
    area = (inside.x0 + 3, inside.y0 + 2, min(inside.x1 + 18, whole.x1 - 2), whole.y1 - 1)
    pixels = IdentityTransform()
    corners = place([*groups], sizes, area, taken)
    for ((x, y), lines), (left, bottom), (width, height) in zip(groups.items(), corners, sizes, strict=True):
        for i, line in enumerate(lines):
            baseline = bottom + height - LINE * (i + 1) + 3.5
            axes.text(left, baseline, line, fontsize=SIZE, transform=pixels, va="baseline")
        # To the middle of the nearest edge that looks at the point.
        end = (min(max(x, left), left + width), min(max(y, bottom), bottom + height))
        if max(abs(end[0] - x), abs(end[1] - y)) > FAR:
            axes.plot(*zip((x, y), end, strict=True), transform=pixels, color="#8a97a5", linewidth=0.6)


def text_width(text: str) -> float:
    """Measure a text in the font of charts, pixels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    return TextToPath().get_text_width_height_descent(text, FontProperties(size=SIZE), ismath=False)[0]


def place(
    points: Sequence[Point], sizes: Sequence[tuple[float, float]], area: Box, taken: Sequence[Box]
) -> list[Point]:
    """Choose the lower left corner of a label (width, height) for every point: the nearest free place.

    One after another, so that a label avoids those before it. Where nothing in the area is free, a label
    covers as few boxes as it can.
    """
    import numpy as np

    boxes, corners = list(taken), []
    left, bottom, right, top = area
    for (x, y), (width, height) in zip(points, sizes, strict=True):
        across = np.arange(left, max(right - width, left) + 1e-6, GRID)
        upwards = np.arange(bottom, max(top - height, bottom) + 1e-6, GRID)
        a, b = (axis.ravel() for axis in np.meshgrid(across, upwards))
        covered = np.zeros(len(a))
        for x0, y0, x1, y1 in boxes:
            covered += (a < x1) & (x0 < a + width) & (b < y1) & (y0 < b + height)
        dx, dy = np.maximum(a - x, x - a - width).clip(0), np.maximum(b - y, y - b - height).clip(0)
        best = np.lexsort((np.hypot(dx, dy), covered))[0]
        corner = (float(a[best]), float(b[best]))
        corners.append(corner)
        boxes.append((*corner, corner[0] + width, corner[1] + height))
    return corners
