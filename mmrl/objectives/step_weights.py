"""Step weights: factors (N, T) of the loss, applied after the division by the aggregation."""

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
    """Truncated importance sampling (TIS): the policy's probability over the engine's.

    The modes and bounds are TRL's `vllm_importance_sampling_mode`, whose default is `sequence_mask`.
    Departs: penalties are weighed as well, which TRL's are not.

    Args:
        mode: `token` takes the ratio of steps, `sequence` that of whole answers; `truncate` limits it to
            the bounds, `mask` sets it to 0 outside of them.
        clip_max: Upper bound of the ratio, or null for none.
        clip_min: Lower bound of the ratio, at most `clip_max`, or null for none.
    """
    gap = (batch.others["old"].logp - batch.others["engine"].logp) * batch.mask
    if mode.startswith("sequence"):
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
    ratio = gap.clamp(-20.0, 20.0).exp()
    low, high = clip_min or 0.0, torch.inf if clip_max is None else clip_max
    if mode.endswith("mask"):
        return torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    return ratio.clamp(low, high)
