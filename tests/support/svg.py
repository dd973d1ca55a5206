"""Boxes of the letters in an SVG, so that tests see what is cut off or overlaps without a browser."""

from __future__ import annotations

import html
import re

Box = tuple[float, float, float, float]  # left, top, right, bottom; SVG's y grows downwards

SHIFT = {"start": 0.0, "middle": 0.5, "end": 1.0}


def text_boxes(svg: str) -> list[Box]:
    """Measure every horizontal `<text>` in the font that it names."""
    boxes = []
    for attributes, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        if "transform" in attributes:  # a title that is turned
            continue
        # As styles or as attributes, in quotation marks of either kind.
        size = float(re.search(r"font-size(?:: ?|=['\"])([\d.]+)", attributes)[1])
        anchor = re.search(r"text-anchor(?:: ?|=['\"])(\w+)", attributes)
        x, y = (float(re.search(rf"\b{name}=['\"](-?[\d.]+)", attributes)[1]) for name in "xy")
        width = text_width(html.unescape(text), size)
        left = x - SHIFT[anchor[1] if anchor else "start"] * width
        boxes.append((left, y - 0.76 * size, left + width, y + 0.1 * size))
    return boxes


def text_width(text: str, size: float) -> float:
    """Measure a text in DejaVu Sans, which is wider than what browsers have in its place."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    # A $ is no formula.
    return TextToPath().get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0]


def overlap(a: Box, b: Box) -> bool:
    """Return whether two boxes share an area."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
