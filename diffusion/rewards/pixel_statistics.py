"""Rewards computed from pixels alone: JPEG size, clipped pixel values, and diversity within a group."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.reward_inputs import VISUAL, RewardInputs
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.reward_base import frames_of, images_of
from mmrl.rewards.adapters import per_outcome
from mmrl.rewards.frames import even_frames, mean_over_frames

JPEG_QUALITY = 95


@reward(inputs=RewardInputs(VISUAL))
def jpeg_compressibility(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    form: Literal["incompressible", "compressible"] = "incompressible",
    frames: PositiveInt = 8,
) -> list[float | None]:
    """Size of an image as JPEG of quality 95, in kilobytes (DDPO, arXiv 2305.13301).

    Args:
        form: `incompressible`: the size. `compressible`: minus the size divided by 500.
        frames: Number of evenly spaced frames of a video to compress; the reward is the mean over them.
    """

    def score(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        sizes = [jpeg_kilobytes(image) for image in images_of(prompts, outcomes)]
        return sizes if form == "incompressible" else [-size / 500 for size in sizes]

    return mean_over_frames(score, prompts, outcomes, frames)


def jpeg_kilobytes(image: Tensor) -> float:
    """Return the JPEG size of an image (3, height, width) uint8 in kB; 1 kB is 1000 bytes, as published."""
    buffer = io.BytesIO()
    to_pil(image).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell() / 1000


@reward(inputs=RewardInputs(VISUAL))
@per_outcome
def clipped_pixels(prompt: Prompt, outcome: Outcome) -> float:
    """Fraction of the pixel values of an image or video that are 0 or 255; a metric with `weight: 0`.

    Images that are over-optimised for a reward are often too bright, too dark or too saturated, which raises
    this fraction. With weight 0 it is logged, but not added to the reward.
    """
    frames = frames_of(prompt, outcome)
    return float(((frames == 0) | (frames == 255)).double().mean())


@reward(inputs=RewardInputs(VISUAL))
def pairwise_diversity(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    size: PositiveInt = 32,
    frames: PositiveInt = 8,
) -> list[float | None]:
    """Mean pixel distance of an image to the others of its prompt, in [0, 1]; a metric with `weight: 0`.

    The distance is the root of the mean squared difference of pixels in [0, 1], after images were averaged to
    `size` x `size` (our reading). An image is compared only with images after as many denoising steps, and
    gets None if there are none. Videos are compared by `frames` frames, evenly from the first to the last.
    """
    images = [
        even_frames(frames_of(prompt, outcome), frames)
        for prompt, outcome in zip(prompts, outcomes, strict=True)
    ]
    groups: dict[tuple, list[int]] = {}  # maps (prompt, step, number of frames) to indices
    for i, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        groups.setdefault((prompt.uid, outcome.end, len(images[i])), []).append(i)
    values: list[float | None] = [None] * len(outcomes)
    for members in groups.values():
        if len(members) < 2:
            continue
        small = torch.stack([adaptive_avg_pool2d(images[i].double() / 255, size).flatten() for i in members])
        # Do not use a matrix product, whose rounding would give identical images a distance above 0.
        gaps = torch.cdist(small, small, compute_mode="donot_use_mm_for_euclid_dist") / small.shape[1] ** 0.5
        for row, i in enumerate(members):
            values[i] = float(gaps[row].sum() / (len(members) - 1))
    return values
