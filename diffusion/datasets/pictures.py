"""Pictures of prompts: to imitate, to prefer one to another, to rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.diffusion.decoding import Reading, read_picture
from mmrl.diffusion.rows import Recorded, recorded_prompts
from mmrl.media import MAX_IMAGE_PIXELS
from mmrl.registry import data
from mmrl.rows import RowError
from mmrl.types import Outcome, Prompt


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
def pictures(
    *,
    path: str,
    root: str,
    height: int = 0,
    width: int = 0,
    max_pixels: int = MAX_IMAGE_PIXELS,
    limit: int = 0,
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

    def read(row: dict[str, Any], place: str) -> Recorded:
        names, scores = _answers(row, place)
        return names, lambda files: Pictures(files, scores, reading)

    return recorded_prompts(Path(path), Path(root), limit, "pictures", read)


def _answers(row: Mapping[str, Any], place: str) -> tuple[list[str], tuple[dict[str, float], ...]]:
    """Find the pictures of a row, and the scores of each."""
    forms = {key for key in ("image", "images", "chosen", "rejected") if key in row}
    match row:
        case {"image": str(name)} if forms == {"image"}:
            names, given = [name], [1.0]
        case {"images": [_, *_] as names} if forms == {"images"}:
            given = [1.0] * len(names)
        case {"chosen": str(first), "rejected": str(second)} if forms == {"chosen", "rejected"}:
            names, given = [first, second], [1.0, 0.0]
        case _:
            raise RowError(
                f"{place}: wanted one of `image`, `images`, or `chosen` and `rejected`, got {sorted(forms)}"
            )
    if not all(isinstance(name, str) for name in names):
        raise RowError(f"{place}: the paths of pictures must be texts, not {names!r}")
    given = row.get("scores", given)
    lists = given if isinstance(given, dict) else {"score": given}
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(names) or not all(map(_is_number, values)):
            raise RowError(f"{place}: '{name}' must hold {len(names)} numbers, one a picture, not {values!r}")
    scores = tuple({name: float(values[i]) for name, values in lists.items()} for i in range(len(names)))
    return list(names), scores


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
