"""Tools that show a part of an image again, as it is or enlarged."""

from __future__ import annotations

import math
from typing import Any

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import tool
from mmrl.vision.tools.functions import ShownImage


@tool
def crop(image: ShownImage, box: list[float]) -> Any:
    """Cut a box out of an image and show it.

    Args:
        image: The number of the image; 0 is the first one.
        box: The left, upper, right and lower edge: pixels, or shares of the image from 0 to 1.
    """
    return image.crop(pixel_box(box, image.width, image.height))


@tool
def zoom(image: ShownImage, box: list[float], factor: float, *, max_pixels: PositiveInt = 1 << 20) -> Any:
    """Cut a box out of an image and show it enlarged.

    Args:
        image: The number of the image; 0 is the first one.
        box: The left, upper, right and lower edge: pixels, or shares of the image from 0 to 1.
        factor: How many times as wide and as high the box becomes, at least 1.
        max_pixels: The most pixels of the enlarged box.
    """
    left, upper, right, lower = pixel_box(box, image.width, image.height)
    if not _is_finite(factor) or factor < 1:
        raise ValueError(f"`factor` must be a number of at least 1, not {factor!r:.40}")
    size = round((right - left) * factor), round((lower - upper) * factor)
    if size[0] * size[1] > max_pixels:
        raise ValueError(f"the box would have {size[0]}x{size[1]} pixels; the limit is {max_pixels}")
    return image.crop((left, upper, right, lower)).resize(size)  # bicubic by default


def pixel_box(box: Any, width: int, height: int) -> tuple[int, int, int, int]:
    """Convert a box to integer pixels (left, upper, right, lower), at least one pixel wide and high.

    Four numbers of at most 1 are fractions of the image size. Raises ValueError for a box outside the image.
    """
    if not isinstance(box, list | tuple) or len(box) != 4 or not all(map(_is_finite, box)):
        raise ValueError(f"`box` must be four numbers [left, upper, right, lower], not {box!r:.80}")
    shares = max(box) <= 1
    left, upper, right, lower = (
        edge * side if shares else edge for edge, side in zip(box, (width, height) * 2, strict=True)
    )
    if not (0 <= left < right <= width and 0 <= upper < lower <= height):
        raise ValueError(f"the box {list(box)} is not inside the image of {width}x{height} pixels")
    # Round outwards, so that a thin box contains at least one pixel.
    return math.floor(left), math.floor(upper), math.ceil(right), math.ceil(lower)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # the comparison is false for NaN
