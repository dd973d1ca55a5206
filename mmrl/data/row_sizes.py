"""Sizes of generated images and videos that data rows request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.core.types import Size
from mmrl.data.fields import RowError, number, short
from mmrl.data.row_fields import has_content

SIZE = ("num_frames", "height", "width")  # columns, named as in diffusers


def row_size(columns: Mapping[str, Any], *, source: bool = False) -> Size | None:
    """Read the requested output size from `height`, `width` and `num_frames` of a row; None without one.

    With `source`, a row may instead have the text "source" in `size`, for the size of its source image.
    Raises `RowError` for a height without a width, and for values that are not positive whole numbers.
    """
    sizes = {name: _whole(columns[name], name) for name in SIZE if has_content(columns.get(name))}
    word = columns.get("size") if has_content(columns.get("size")) else ""
    if not source and word == "source":
        raise RowError("the row asks for the `size` of its source image, and rows here have none")
    word = word if source else ""  # without `source`, `size` may be an unrelated column
    if word not in ("", "source"):
        raise RowError(f"wanted 'source' as `size`, got {short(word)}; other sizes are `height` and `width`")
    if word and {"height", "width"} & sizes.keys():
        raise RowError("the row has a `size` besides `height` and `width`; keep one")
    if ("height" in sizes) != ("width" in sizes):
        raise RowError("the row has one of `height` and `width`; give both, or neither")
    return Size(**sizes, source=bool(word)) if sizes or word else None


def _whole(value: Any, name: str) -> int:
    size = number(value, name)
    if size < 1 or size % 1:
        raise RowError(f"wanted a positive whole number as `{name}`, got {short(value)}")
    return int(size)
