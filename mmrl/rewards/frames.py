"""Rewards of images applied to frames of videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from mmrl.core.tensor import linspace_indices
from mmrl.core.types import Outcome, Prompt

Scores = Sequence[float | None]


def even_frames(video: Tensor, frames: int) -> Tensor:
    """Select up to `frames` frames of a video (F, 3, height, width), evenly from the first to the last."""
    return video[linspace_indices(len(video), frames)]


def mean_over_frames(
    score: Callable[[Sequence[Prompt], Sequence[Outcome]], Scores],
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    frames: int,
) -> list[float | None]:
    """Score outcomes by a function of images; a video gets the mean over `frames` even frames.

    `score` maps prompts and outcomes with images to one value each. A video with a frame without a value
    (None) has none. Outcomes without a video are passed on as they are.
    """
    owners: list[int] = []  # index of the outcome of every image
    images: list[Outcome] = []
    for i, outcome in enumerate(outcomes):
        if outcome.image is not None or outcome.video is None:
            shown = [outcome]
        else:
            selected = even_frames(outcome.video, frames)
            shown = [replace(outcome, image=frame, video=None, times=None) for frame in selected]
        images += shown
        owners += [i] * len(shown)
    values: list[list[float | None]] = [[] for _ in outcomes]
    for i, value in zip(owners, score([prompts[i] for i in owners], images), strict=True):
        values[i].append(value)
    return [_mean(several) for several in values]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
