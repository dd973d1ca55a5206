"""Data sets of recorded images: demonstrations, preference pairs, and scored lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError, listed, number, text
from mmrl.data.media import MAX_IMAGE_PIXELS
from mmrl.data.text_files import Scores, recorded_prompts
from mmrl.diffusion.image_io import load_image


@data
def images(
    *,
    path: str,
    root: str,
    height: NonNegativeInt = 0,
    width: NonNegativeInt = 0,
    max_pixels: PositiveInt = MAX_IMAGE_PIXELS,
    limit: NonNegativeInt = 0,
) -> list[Prompt]:
    """Prompts with recorded images: to imitate, to compare, or to rank.

    A row has a `prompt` (or `caption`), and its images as `image` (a path), `images` (a list of paths), or
    `chosen` and `rejected`. `scores` holds one number per image, stored as its reward `score`, or lists of
    them by the name of a reward. Without it a rejected image has the score 0 and any other, as a
    demonstration, 1. All missing files are named before training starts.

    Args:
        path: File of rows, one JSON object a line.
        root: Folder that the paths are relative to and must stay in.
        height: With `width`, images are cropped around the centre to this aspect ratio and resized, pixels.
        width: See `height`; 0 for both keeps the images' own sizes.
        max_pixels: Most pixels of an image file.
        limit: Most rows to read; 0 is all.
    """
    if bool(height) != bool(width):
        raise ValueError(f"give both height and width, or neither; got {height} and {width}")
    load = lambda file: Outcome(image=load_image(file, height, width, max_pixels))
    return recorded_prompts(Path(path), Path(root), limit, _names_and_scores, load)


def _names_and_scores(row: Mapping[str, Any]) -> tuple[list[str], Scores]:
    """Read the paths of a row's images, and the scores of each."""
    forms = sorted({"image", "images", "chosen", "rejected"} & row.keys())
    match forms:
        case ["image"]:
            paths = [row["image"]]
        case ["images"] if row["images"] != []:
            paths = listed(row["images"], "images")
        case ["chosen", "rejected"]:
            paths = [row["chosen"], row["rejected"]]
        case _:
            raise RowError(f"wanted one of `image`, `images`, or `chosen` and `rejected`, got {forms}")
    names = [text(name, f"path of image {i}") for i, name in enumerate(paths)]
    values = row.get("scores", [1.0, 0.0] if len(forms) == 2 else [1.0] * len(names))
    by_reward = values if isinstance(values, Mapping) else {"score": values}
    scores: list[dict[str, float]] = [{} for _ in names]
    for name, numbers in by_reward.items():
        for score, value in zip(scores, listed(numbers, f"scores: {name}", len(names)), strict=True):
            score[name] = number(value, f"scores: {name}")
    return names, tuple(scores)
