"""A surrogate with a clip range per step."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, Range
from mmrl.config.registry import surrogate
from mmrl.core.step_table import Batch, StepOutput


@surrogate
def elastic_clip(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    epsilon: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat | None = None,
    dual: Annotated[float, Range(1)] | None = None,
) -> Tensor:
    """Clipped surrogate with a clip range per step, which advantage functions set (HAPO, ETR).

    The advantage functions `variance_width` and `entropy_width` record factors of the ranges. `entropy_width`
    also records a factor of advantages. This factor applies to a step of high entropy if its ratio is outside
    of half the clip range, and to other steps if their ratio is inside. Steps without recorded factors use
    the ranges of the options, as in `clip`. Log-ratios are clamped to [-20, 20].

    Args:
        epsilon: Lower clip range of the ratio, and the upper one if `epsilon_high` is null.
        epsilon_high: Upper clip range.
        dual: Upper bound of the loss for a negative advantage A, in multiples of |A|; at least 1.
    """

    def note(name: str, missing: float) -> Tensor:
        values = batch.notes.get(name, torch.full_like(batch.advantage, missing))
        return values.to(log_ratio.dtype).nan_to_num(nan=missing)

    low = (epsilon * note("clip_low", 1.0)).clamp(max=1.0)  # ratios are at least 0
    high = (epsilon if epsilon_high is None else epsilon_high) * note("clip_high", 1.0)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    inside = (ratio > 1 - low / 2) & (ratio < 1 + high / 2)
    changed = torch.where(note("high_entropy", 0.0) > 0, ~inside, inside)
    advantage = batch.advantage * torch.where(changed, note("redistribution", 1.0), 1.0)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)
    return loss
