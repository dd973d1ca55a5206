"""Surrogates: per-step losses from ratio and advantage, all (N, T); log-ratios lie in [-20, 20]."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeFloat, PositiveFloat, Range
from mmrl.config.registry import surrogate
from mmrl.core.step_table import Batch, StepOutput


def _ratio(log_ratio: Tensor) -> Tensor:
    # One step with an absurd probability would otherwise make its whole row infinite.
    return log_ratio.clamp(-20.0, 20.0).exp()


@surrogate
def clip(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    epsilon: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat | None = None,
    delta: PositiveFloat | None = None,
    dual: Annotated[float, Range(1)] | None = None,
) -> Tensor:
    """Clipped surrogate: the larger loss of the ratio and the clipped ratio (PPO, GRPO, arXiv 2402.03300).

    Args:
        epsilon: Lower clip range of the ratio, and the upper one where `epsilon_high` is null.
        epsilon_high: Upper clip range (DAPO's clip-higher, 0.28).
        delta: Upper bound of the unclipped ratio, larger than 1 + epsilon_high (two-sided clipping,
            INTELLECT-2).
        dual: Bounds the loss of a negative advantage at this many times its size, at least 1 (dual-clip
            PPO).
    """
    advantage = batch.advantage
    ratio = _ratio(log_ratio)
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    free = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(free * advantage, clipped * advantage)
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)
    return loss


@surrogate
def unclipped(log_ratio: Tensor, new: StepOutput, batch: Batch) -> Tensor:
    """Unclipped surrogate: minus ratio times advantage."""
    return -_ratio(log_ratio) * batch.advantage


@surrogate
def log_likelihood(log_ratio: Tensor, new: StepOutput, batch: Batch) -> Tensor:
    """REINFORCE: minus log-probability times advantage.

    With demonstrations and an advantage of 1 it is supervised fine-tuning.
    """
    return -batch.advantage * new.logp


@surrogate
def cispo(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    clip_max: PositiveFloat = 5.0,
    clip_min: Annotated[NonNegativeFloat, AtMost("clip_max")] = 0.0,
) -> Tensor:
    """Clip the ratio as a constant weight; no step's gradient vanishes (CISPO, arXiv 2506.13585).

    The bound is from arXiv 2510.13786.
    """
    return -_ratio(log_ratio).clamp(clip_min, clip_max).detach() * batch.advantage * new.logp


@surrogate
def sapo(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    temperature_pos: PositiveFloat = 1.0,
    temperature_neg: PositiveFloat = 1.05,
) -> Tensor:
    """Fade the gradient out with a sigmoid instead of clipping it (SAPO, arXiv 2511.20347)."""
    # `where` of two Python numbers would be float32
    tau = torch.full_like(log_ratio, temperature_neg).masked_fill(batch.advantage > 0, temperature_pos)
    return -(4 / tau) * torch.sigmoid(tau * (_ratio(log_ratio) - 1)) * batch.advantage
