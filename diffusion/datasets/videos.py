"""Recorded videos and what they are worth, as a whole or segment by segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.diffusion.film import read_film
from mmrl.diffusion.rows import Recorded, recorded_prompts
from mmrl.registry import data
from mmrl.rows import RowError
from mmrl.types import Outcome, Prompt


class Films(Sequence):
    """The recorded videos of one prompt, decoded when somebody looks at them."""

    def __init__(
        self, files: tuple[Path, ...], recorded: tuple[Mapping[str, float], ...], size: tuple[int, int, int]
    ) -> None:
        self.files, self.recorded, self.size = files, recorded, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> Outcome:
        frames, times = read_film(self.files[at], *self.size)
        return Outcome(video=frames, times=times, recorded=self.recorded[at])


@data
def videos(*, path: str, root: str, num_frames: int, height: int, width: int, limit: int = 0) -> list[Prompt]:
    """Read videos of prompts under `root`, one JSON object a line: a `prompt`, and `videos`, a list of paths.

    `scores` holds one number per video, or a list of numbers per video, one a segment of equal length
    (DenseDPO, arXiv 2506.03517), which `diffusion.by_segment` reads. They are the recorded reward `score`.
    Every video is brought to `num_frames` frames of `height` times `width` pixels. Every missing file is
    named before anything is trained.
    """

    def read(row: dict[str, Any], place: str) -> Recorded:
        names = row.get("videos")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise RowError(f"{place}: `videos` must be a list of paths, not {names!r}")
        worth = _recorded(row, len(names), place)
        return names, lambda files: Films(files, worth, (num_frames, height, width))

    return recorded_prompts(Path(path), Path(root), limit, "videos", read)


def _recorded(row: Mapping[str, Any], count: int, place: str) -> tuple[dict[str, float], ...]:
    scores = row.get("scores", [1.0] * count)
    if not isinstance(scores, list) or len(scores) != count:
        raise RowError(f"{place}: `scores` must hold {count} entries, one a video, not {scores!r}")
    return tuple(_of_one(score, place) for score in scores)


def _of_one(score: Any, place: str) -> dict[str, float]:
    match score:
        case int() | float():
            return {"score": float(score)}
        case [_, *_] if all(isinstance(value, int | float) for value in score):
            return {f"score@{segment}": float(value) for segment, value in enumerate(score)}
    raise RowError(
        f"{place}: a video's score must be a number, or a list of numbers by segment, not {score!r}"
    )
