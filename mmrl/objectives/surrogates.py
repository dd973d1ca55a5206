"""Ratios, surrogates and step weights of policy-gradient losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeFloat, PositiveFloat, Range
from mmrl.config.registry import ratio, step_weight, surrogate
from mmrl.config.schema import Piece
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import masked_mean
from mmrl.core.types import Unit


@ratio
def step_ratio(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Log-ratio of every step (PPO, GRPO); surrogates clamp it to [-20, 20] before exp."""
    return (new.logp - batch.by(against, new).logp) * batch.mask


@ratio(unit=Unit.ROW)
def sequence_ratio(
    new: StepOutput, batch: Batch, *, against: str = "old", level: Literal["sequence", "token"] = "sequence"
) -> Tensor:
    """Mean log-ratio of the row for each of its steps, at most 10 (GSPO, arXiv 2507.18071).

    `level: token` has the same value, but the gradient of a step comes from its own log-probability
    (GSPO-token), so that advantages may differ between steps. Use it with `sequence_mean`: `step_mean` would
    weight rows by length.
    """
    gap = step_ratio(new, batch, against=against)
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (gap.sum(-1, keepdim=True) / length).expand_as(gap)
    if level == "token":
        mean = mean.detach() + new.logp - new.logp.detach()  # value: mean; gradient: the step's own
    return mean.clamp(max=10.0) * batch.mask


@ratio(unit=Unit.ROW)
def sequence_sum(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Summed log-ratio of the row for each of its steps, clamped to [-20, 20] (RLOO, arXiv 2402.14740)."""
    gap = step_ratio(new, batch, against=against)
    return gap.sum(-1, keepdim=True).expand_as(gap).clamp(-20.0, 20.0) * batch.mask


@ratio(unit=Unit.ROW)
def geometric_ratio(
    new: StepOutput,
    batch: Batch,
    *,
    epsilon: NonNegativeFloat = 0.4,
    epsilon_high: NonNegativeFloat | None = None,
    against: str = "old",
) -> Tensor:
    """Mean clipped log-ratio of the row: a geometric mean of clipped ratios (GMPO, arXiv 2507.20673).

    The log-ratio of a step is clipped in the direction in which its advantage pushes it, as in PPO but in
    log space. A clipped step has no gradient. Use it with `unclipped` and `sequence_mean`.

    Args:
        epsilon: Lower clip range of the log-ratio, and the upper one where `epsilon_high` is null.
        epsilon_high: Upper clip range of the log-ratio.
        against: Name of the other policy.
    """
    gap, sign = step_ratio(new, batch, against=against), batch.advantage.sign()
    clipped = gap.clamp(-epsilon, epsilon if epsilon_high is None else epsilon_high)
    # Take the smaller (pessimistic) value of sign * gap; 0 for an advantage of 0.
    pessimistic = sign * torch.minimum(sign * gap, sign * clipped)
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return pessimistic.sum(-1, keepdim=True) / length * batch.mask


@step_weight(unit=Unit.ROW, others={"old", "engine"})
def truncated_importance(
    batch: Batch,
    *,
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate",
    clip_max: PositiveFloat | None = 3.0,
    clip_min: Annotated[NonNegativeFloat, AtMost("clip_max")] | None = None,
) -> Tensor:
    """Truncated importance sampling (TIS): weight steps by the probability ratio of policy to engine.

    Modes and bounds are those of TRL's `vllm_importance_sampling_mode`, whose default is `sequence_mask`.
    Unlike in TRL, the weights also apply to penalties, such as the KL penalty.

    Args:
        mode: `token`: ratios of steps. `sequence`: ratios of whole answers. `truncate`: clamp ratios to the
            bounds. `mask`: set ratios outside of the bounds to 0. Log-ratios are clamped to [-20, 20].
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


def _ratio(log_ratio: Tensor) -> Tensor:
    # Clamp: otherwise one extreme step makes the loss of its whole row infinite.
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
    """Clipped surrogate: the larger loss, with plain or with clipped ratio (PPO, GRPO, arXiv 2402.03300).

    Args:
        epsilon: Lower clip range of the ratio, and the upper one if `epsilon_high` is null.
        epsilon_high: Upper clip range (DAPO's clip-higher, 0.28).
        delta: Upper bound of the unclipped ratio, larger than 1 + epsilon_high (two-sided clipping,
            INTELLECT-2).
        dual: Upper bound of the loss for a negative advantage A, in multiples of |A|; at least 1 (dual-clip
            PPO).
    """
    advantage = batch.advantage
    ratio = _ratio(log_ratio)
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    free = ratio if delta is None else ratio.clamp(max=delta)  # takes effect where A < 0
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
    """REINFORCE: minus log-probability times advantage; with an advantage of 1, SFT on demonstrations."""
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
    """REINFORCE weighted by the clipped, detached ratio: no step is dropped (CISPO, arXiv 2506.13585).

    The default bound is from arXiv 2510.13786.
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
    """Sigmoid gate of the ratio instead of a clip (SAPO, arXiv 2511.20347)."""
    # (N, T) temperature of each step, in the dtype of the log-ratio.
    tau = torch.full_like(log_ratio, temperature_neg).masked_fill(batch.advantage > 0, temperature_pos)
    # The factor 4 / tau makes the slope 1 at a ratio of 1, as without the gate.
    return -(4 / tau) * torch.sigmoid(tau * (_ratio(log_ratio) - 1)) * batch.advantage


@surrogate
def gamma_weight(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    k_pos: PositiveFloat = 2.0,
    lambda_pos: PositiveFloat = 3.0,
    k_neg: PositiveFloat = 3.0,
    lambda_neg: PositiveFloat = 2.0,
) -> Tensor:
    """REINFORCE weighted by a gamma density of the ratio of an answer (VESPO, arXiv 2602.10693).

    The detached weight of the ratio W is W^k exp(lambda (1 - W)), 1 at W = 1 and largest at W = k / lambda.
    Use it with the ratio `sequence_sum`. W is at least 1e-8. Options and defaults are TRL's `vespo_*`.

    Args:
        k_pos: k for advantages of at least 0.
        lambda_pos: lambda for advantages of at least 0.
        k_neg: k for negative advantages.
        lambda_neg: lambda for negative advantages.
    """
    log_w, good = log_ratio.detach().clamp(math.log(1e-8), 20.0), batch.advantage >= 0
    k = torch.full_like(log_w, k_neg).masked_fill(good, k_pos)
    decay = torch.full_like(log_w, lambda_neg).masked_fill(good, lambda_pos)
    weight = (k * log_w + decay * (1 - log_w.exp())).exp()
    return -weight * batch.advantage * new.logp


@surrogate(unit=Unit.ROW)
def off_policy_mask(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    surrogate: Callable = Piece("clip"),
    threshold: NonNegativeFloat = 0.5,
    against: str = "old",
) -> Tensor:
    """Mask negative-advantage steps of answers that drifted from the sampling policy (arXiv 2512.02556).

    Off-policy sequence masking of DeepSeek-V3.2: a step of negative advantage has loss 0 if the mean of log
    old - log new over its answer is above `threshold`. Divisors and penalties do not change.

    Args:
        surrogate: Loss of the other steps.
        threshold: Largest mean drift, in nats per step (TRL's `off_policy_mask_threshold`).
        against: Sampling policy: `old`, or `engine` to include the mismatch of the engine, as in TRL.
    """
    drift = masked_mean(-step_ratio(new.detach(), batch, against=against), batch.mask, -1)[:, None]
    kept = (batch.advantage >= 0) | (drift <= threshold)
    return torch.where(kept, surrogate(log_ratio, new, batch), 0.0)
