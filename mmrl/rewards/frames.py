"""Application of image rewards to the frames of videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from mmrl.core.tensor import linspace_indices
from mmrl.core.types import Outcome, Prompt

Scores = Sequence[float | None]


def even_frames(video: Tensor, frames: int) -> Tensor:
    """Select up to `frames` evenly spaced frames of a video (num_frames, 3, height, width)."""
    return video[linspace_indices(len(video), frames)]


def mean_over_frames(
    score: Callable[[Sequence[Prompt], Sequence[Outcome]], Scores],
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    frames: int,
) -> list[float | None]:
    """Score images with `score`; for a video, average the scores of `frames` evenly spaced frames.

    `score` maps prompts and outcomes with images to one value per outcome. A video gets None if one
    of its frames gets None. Outcomes without a video are passed to `score` unchanged.
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


def frame_rate(prompt: Prompt, outcome: Outcome) -> float:
    """Return the frames per second of a video, from the times of its first and last frame."""
    times = outcome.times
    if times is None or len(times) < 2 or not times[-1] > times[0]:
        raise ValueError(f"the video of prompt '{prompt.uid}' has no times of its frames, or only one frame")
    # Round away the float32 error of times, because rewards round values derived from the rate.
    return round((len(times) - 1) / float(times[-1] - times[0]), 3)
