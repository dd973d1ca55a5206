"""Penalties: per-step terms (N, T) that are added to the loss. `against` names the other policy."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, PositiveFloat
from mmrl.config.registry import penalty
from mmrl.core.reward_table import EQUAL
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import group_extreme, group_index, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.surrogates import step_ratio


@penalty
def k1(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001, against: str = "ref") -> Tensor:
    """KL estimator k1, the log-ratio: unbiased, but its gradient is just that of log pi."""
    return coef * step_ratio(new, batch, against=against)


@penalty
def kl_abs(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001, against: str = "ref") -> Tensor:
    """Absolute log-ratio (verl's kl_penalty abs): its gradient has the same size at any distance."""
    return coef * step_ratio(new, batch, against=against).abs()


@penalty
def k2(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001, against: str = "ref") -> Tensor:
    """KL estimator k2, half the squared log-ratio: its on-policy gradient is the gradient of the KL."""
    return coef * 0.5 * step_ratio(new, batch, against=against).square()


@penalty
def k3(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 0.001,
    against: str = "ref",
    use_bias_correction_kl: bool = False,
    clip_max: PositiveFloat | None = None,
) -> Tensor:
    """KL estimator k3, exp(-d) + d - 1 of the log-ratio d: unbiased and never negative (GRPO).

    As exp(-d) can overflow float32, d is clamped to at least -20, and the ratio to `old` to at most exp(20).

    Args:
        coef: Weight of the penalty (TRL's `beta`).
        against: Name of the other policy.
        use_bias_correction_kl: Multiply by the ratio to `old` (DeepSeek-V3.2, arXiv 2512.02556).
        clip_max: Upper bound of the estimate, above which a step has no gradient; verl: 10, TRL: none.
    """
    gap = step_ratio(new, batch, against=against).clamp(min=-20.0)
    estimate = (-gap).exp() + gap - 1  # r - 1 - log r with r = p_other / p_new
    if clip_max is not None:
        estimate = estimate.clamp(max=clip_max)
    if use_bias_correction_kl:
        estimate = estimate * step_ratio(new, batch, against="old").clamp(max=20.0).exp()
    return coef * estimate


@penalty(extra={"entropy"})
def entropy_bonus(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001) -> Tensor:
    """Entropy bonus: minus the entropy of the distribution of every step."""
    return -coef * new.extra["entropy"]


@penalty(unit=Unit.ROW, extra={"divergence"}, of_others={"hidden"})
def distillation(
    new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 1.0, against: str = "teacher"
) -> Tensor:
    """Divergence from a teacher's distribution at every step (GKD, arXiv 2306.13649).

    On answers of the policy this is on-policy distillation. The options of the teacher select the divergence:
    forward, reverse or Jensen-Shannon (`beta`), over the vocabulary or over likely tokens. Unlike `k2`, the
    gradient has no variance from the sampled token. `against` names a reference with its own model, such as
    `vision.teacher` or `vision.served_teacher`.
    """
    return coef * new.extra["divergence"]


# ---- imitation


@penalty(unit=Unit.GROUP)
def sft(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.5) -> Tensor:
    """Raise the log-probability of the best row of every group (GDRO, arXiv 2601.02036).

    `coef` is gamma of the paper. For a flow policy the loss is the matching error of the best image, and the
    aggregation `group_mean` sums it as the paper does. The best row is the first with the largest mean
    advantage. Our reading: a group of equal advantages has no best row.
    """
    index, counted = group_index([batch.group]), batch.mask.sum(-1) > 0
    merit = masked_mean(batch.advantage, batch.mask, -1)
    most, least = (group_extreme(merit, index, counted, largest) for largest in (True, False))
    rows = torch.arange(len(merit), dtype=torch.float64, device=merit.device)  # not int64: needs infinity
    candidates = counted & (merit == most) & (most - least > EQUAL)
    best = candidates & (rows == group_extreme(rows, index, candidates, largest=False))  # first if equal
    return -coef * new.logp * best[:, None]
