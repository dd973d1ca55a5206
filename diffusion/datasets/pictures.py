"""Pictures of prompts: to imitate, to prefer one to another, to rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError, listed, number, text
from mmrl.data.media import MAX_IMAGE_PIXELS
from mmrl.data.text_files import Recorded, recorded_prompts
from mmrl.diffusion.image_io import Reading, read_picture


@dataclass(frozen=True)
class Pictures(Sequence):
    """The pictures of one prompt as its recorded answers. Each is decoded when somebody looks at it, and not
    kept."""

    files: tuple[Path, ...]
    scores: tuple[Mapping[str, float], ...]
    reading: Reading = field(default_factory=Reading)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> Outcome:
        return Outcome(image=read_picture(self.files[at], self.reading), recorded=self.scores[at])


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
    """Read pictures of prompts under `root`, one JSON object a line, with a `prompt` (or `caption`) and its
    pictures.

    The pictures are `image` (a path), `images` (a list of paths), or `chosen` and `rejected`. `scores` holds
    one number per picture, kept as its reward `score`, or lists of them by the name of a reward. Without it
    the rejected picture has the score 0 and any other, as a demonstration, 1. With `height` and `width`
    pictures are cut to that form around the middle, then resized. Every missing file is named before anything
    is trained.
    """
    if bool(height) != bool(width):
        raise ValueError(f"give both height and width, or neither; got {height} and {width}")
    reading = Reading(max_pixels, height, width)

    def read(row: Mapping[str, Any]) -> Recorded:
        names, scores = _answers(row)
        return names, lambda files: Pictures(files, scores, reading)

    return recorded_prompts(Path(path), Path(root), limit, read)


def _answers(row: Mapping[str, Any]) -> tuple[list[str], tuple[dict[str, float], ...]]:
    """Find the images of a row, and the scores of each."""
    forms = sorted({"image", "images", "chosen", "rejected"} & row.keys())
    match forms:
        case ["image"]:
            held = [row["image"]]
        case ["images"] if row["images"] != []:
            held = listed(row["images"], "images")
        case ["chosen", "rejected"]:
            held = [row["chosen"], row["rejected"]]
        case _:
            raise RowError(f"wanted one of `image`, `images`, or `chosen` and `rejected`, got {forms}")
    names = [text(name, f"path of image {i}") for i, name in enumerate(held)]
    given = row.get("scores", [1.0, 0.0] if len(forms) == 2 else [1.0] * len(names))
    lists = given if isinstance(given, Mapping) else {"score": given}
    scores: list[dict[str, float]] = [{} for _ in names]
    for name, values in lists.items():
        for score, value in zip(scores, listed(values, f"scores: {name}", len(names)), strict=True):
            score[name] = number(value, f"scores: {name}")
    return names, tuple(scores)
