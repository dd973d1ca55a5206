"""How much a counted step weighs: multipliers (N, T), applied after the division."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeFloat, PositiveFloat
from mmrl.config.registry import step_weight
from mmrl.core.step_table import Batch
from mmrl.core.types import Unit


@step_weight(unit=Unit.ROW, others={"old", "engine"})
def truncated_importance(
    batch: Batch,
    *,
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate",
    clip_max: PositiveFloat | None = 3.0,
    clip_min: Annotated[NonNegativeFloat, AtMost("clip_max")] | None = None,
) -> Tensor:
    """Weigh by the policy's probability over the engine's, truncated to [clip_min, clip_max] or 0 outside
    (TIS).

    The four modes and the bounds are TRL's `vllm_importance_sampling_mode`, whose default is `sequence_mask`;
    `sequence` takes the ratio of whole answers. Departs: penalties are weighed as well, which TRL's are not.
    """
    gap = (batch.others["old"].logp - batch.others["engine"].logp) * batch.mask
    if mode.startswith("sequence"):
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
    ratio = gap.clamp(-20.0, 20.0).exp()
    low, high = clip_min or 0.0, torch.inf if clip_max is None else clip_max
    if mode.endswith("mask"):
        return torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    return ratio.clamp(low, high)
