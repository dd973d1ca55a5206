"""Labels that tell how pictures change while a reward rises: give them weight 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import adaptive_avg_pool2d

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import frames_of, picture_of


@reward
@per_outcome
def clipped_pixels(prompt: Prompt, outcome: Outcome) -> float:
    """Measure which share of the pixel values of a picture or clip stands at 0 or 255.

    Pictures that drift towards what a reward likes are often too bright, too dark or too colourful; an alarm
    on this share says so.
    """
    frames = frames_of(prompt, outcome)
    return float(((frames == 0) | (frames == 255)).double().mean())


@reward
def pairwise_diversity(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, size: PositiveInt = 32
) -> list[float | None]:
    """Measure how far a picture is from the others of its prompt, on average, in [0, 1].

    The distance is the root of the mean squared difference of pixels in [0, 1], after pictures were averaged
    to `size` x `size` (our reading). Pictures that have seen equally many steps are compared; a picture
    without others has none. Of a clip the first frame counts.
    """
    groups: dict[tuple, list[int]] = {}
    for i, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        groups.setdefault((prompt.uid, outcome.end), []).append(i)
    values: list[float | None] = [None] * len(outcomes)
    for places in groups.values():
        small = torch.stack(
            [
                adaptive_avg_pool2d(picture_of(prompts[i], outcomes[i]).double() / 255, size).flatten()
                for i in places
            ]
        )
        gaps = torch.cdist(small, small, compute_mode="donot_use_mm_for_euclid_dist") / small.shape[1] ** 0.5
        for row, i in enumerate(places):
            values[i] = float(gaps[row].sum() / (len(places) - 1)) if len(places) > 1 else None
    return values
