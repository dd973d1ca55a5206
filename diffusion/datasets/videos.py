"""Data sets of recorded videos, scored as a whole or segment by segment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError, listed, number, text
from mmrl.data.text_files import Scores, recorded_prompts
from mmrl.diffusion.image_io import load_video


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
    """Prompts with recorded videos, scored as a whole or by segment.

    A row has a `prompt` and `videos`, a list of paths. `scores` holds one number per video, or a list of
    numbers per video, one for each segment of equal duration (DenseDPO, arXiv 2506.03517), which
    `diffusion.segment_preferences` reads. They are the recorded reward `score`. All missing files are named
    before training starts.

    Args:
        path: File of rows, one JSON object a line.
        root: Folder that the paths are relative to and must stay in.
        num_frames: Frames to take from each video, evenly spread.
        height: Height that frames are scaled to, pixels.
        width: Width that frames are scaled to, pixels.
        limit: Most rows to read; 0 is all.
    """

    def load(file: Path) -> Outcome:
        frames, times = load_video(file, num_frames, height, width)
        return Outcome(video=frames, times=times)

    return recorded_prompts(Path(path), Path(root), limit, _names_and_scores, load)


def _names_and_scores(row: Mapping[str, Any]) -> tuple[list[str], Scores]:
    """Read the paths of a row's videos, and the score of each, a number or a list by segment."""
    names = [text(name, f"videos[{i}]") for i, name in enumerate(listed(row.get("videos"), "videos"))]
    if not names:
        raise RowError("wanted at least one path in `videos`, got []")
    scores: list[Mapping[str, float]] = []
    for i, score in enumerate(listed(row.get("scores", [1.0] * len(names)), "scores", len(names))):
        if not isinstance(score, list):
            scores.append({"score": number(score, f"scores[{i}]")})
        elif score:
            scores.append({f"score@{k}": number(value, f"scores[{i}]") for k, value in enumerate(score)})
        else:
            raise RowError(f"wanted a number, or a list of numbers by segment, as `scores[{i}]`, got []")
    return names, tuple(scores)
