"""Recorded videos and what they are worth, as a whole or segment by segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError, listed, number, text
from mmrl.data.text_files import Recorded, recorded_prompts
from mmrl.diffusion.video_io import read_film


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
def videos(
    *,
    path: str,
    root: str,
    num_frames: PositiveInt,
    height: PositiveInt,
    width: PositiveInt,
    limit: NonNegativeInt = 0,
) -> list[Prompt]:
    """Read videos of prompts under `root`, one JSON object a line: a `prompt`, and `videos`, a list of paths.

    `scores` holds one number per video, or a list of numbers per video, one a segment of equal length
    (DenseDPO, arXiv 2506.03517), which `diffusion.segment_preferences` reads. They are the recorded reward
    `score`. Every video is brought to `num_frames` frames of `height` times `width` pixels. Every missing
    file is named before anything is trained.
    """

    def read(row: Mapping[str, Any]) -> Recorded:
        held = listed(row.get("videos"), "videos")
        names = [text(name, f"videos[{i}]") for i, name in enumerate(held)]
        if not names:
            raise RowError("wanted at least one path in `videos`, got []")
        scores = listed(row.get("scores", [1.0] * len(names)), "scores", len(names))
        recorded = tuple(_of_one(score, f"scores[{i}]") for i, score in enumerate(scores))
        return names, lambda files: Films(files, recorded, (num_frames, height, width))

    return recorded_prompts(Path(path), Path(root), limit, read)


def _of_one(score: Any, name: str) -> dict[str, float]:
    """Read what a video is worth, a number or a list of numbers by segment."""
    if not isinstance(score, list):
        return {"score": number(score, name)}
    if not score:
        raise RowError(f"wanted a number, or a list of numbers by segment, as `{name}`, got []")
    return {f"score@{segment}": number(value, name) for segment, value in enumerate(score)}
