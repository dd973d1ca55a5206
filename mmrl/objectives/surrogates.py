"""Ratios, surrogates and step weights: the factors of a policy-gradient loss."""

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
    """Log-ratio of every step (PPO, GRPO).

    Surrogates limit it to [-20, 20] before they take its exponent.
    """
    return (new.logp - batch.by(against, new).logp) * batch.mask


@ratio(unit=Unit.ROW)
def sequence_ratio(
    new: StepOutput, batch: Batch, *, against: str = "old", level: Literal["sequence", "token"] = "sequence"
) -> Tensor:
    """Mean log-ratio of the row, for each of its steps, at most 10 (GSPO, arXiv 2507.18071).

    `level: token` keeps that value but lets the gradient of every step through its own log-probability
    (GSPO-token), so that advantages may differ between steps. Use it with `sequence_mean`: `step_mean`
    would bring the lengths back in.
    """
    gap = step_ratio(new, batch, against=against)
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (gap.sum(-1, keepdim=True) / length).expand_as(gap)
    if level == "token":
        mean = mean.detach() + new.logp - new.logp.detach()  # the mean in value, the step's own gradient
    return mean.clamp(max=10.0) * batch.mask


@ratio(unit=Unit.ROW)
def sequence_sum(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Summed log-ratio of the row, for each of its steps (RLOO, arXiv 2402.14740).

    It is the log-ratio of whole answers, limited to [-20, 20].
    """
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

    Each step's log-ratio is clipped on the side that its advantage would push it to, as in PPO but in log
    space; a clipped step has no gradient. Use it with `unclipped` and `sequence_mean`.

    Args:
        epsilon: Lower clip range of the log-ratio, and the upper one where `epsilon_high` is null.
        epsilon_high: Upper clip range of the log-ratio.
        against: Name of the other policy.
    """
    gap, sign = step_ratio(new, batch, against=against), batch.advantage.sign()
    clipped = gap.clamp(-epsilon, epsilon if epsilon_high is None else epsilon_high)
    # The smaller of sign * gap is the pessimistic one; where the advantage is 0 nothing is left.
    kept = sign * torch.minimum(sign * gap, sign * clipped)
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return kept.sum(-1, keepdim=True) / length * batch.mask


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
            the bounds, `mask` sets it to 0 outside of them. Log-ratios count within [-20, 20].
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
    free = ratio if delta is None else ratio.clamp(max=delta)  # the minimum below takes it where A < 0
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
    # (N, T) by the sign of the advantage; `where` of two Python numbers would be float32.
    tau = torch.full_like(log_ratio, temperature_neg).masked_fill(batch.advantage > 0, temperature_pos)
    # 4 / tau: the slope at a ratio of 1 is 4 / tau * tau / 4 = 1, as without the gate.
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
    """Weigh log-probabilities by a gamma density of the answer's ratio (VESPO, arXiv 2602.10693).

    The weight W^k exp(lambda (1 - W)) of the ratio W carries no gradient and is 1 at W = 1. Use it with the
    ratio `sequence_sum`. The ratio is at least 1e-8, as in TRL. Options and constants are TRL's `vespo_*`.

    Args:
        k_pos: Power of the ratio where the advantage is at least 0.
        lambda_pos: Decay where the advantage is at least 0; the weight is largest at k / lambda.
        k_neg: Power of the ratio where the advantage is negative.
        lambda_neg: Decay where the advantage is negative.
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
    """Drop negative answers that have drifted away from the policy that sampled (arXiv 2512.02556).

    Off-policy sequence masking of DeepSeek-V3.2: a step of negative advantage costs nothing where the mean
    of log old - log new over its answer is above `threshold`. Divisors and penalties are as without it.

    Args:
        surrogate: Loss of the steps that stay.
        threshold: Largest mean drift of an answer, in nats a step (TRL's `off_policy_mask_threshold`).
        against: Policy that sampled: `old`, or `engine` for the mismatch of the engine too, as in TRL.
    """
    drift = masked_mean(-step_ratio(new.detach(), batch, against=against), batch.mask, -1)[:, None]
    kept = (batch.advantage >= 0) | (drift <= threshold)
    return torch.where(kept, surrogate(log_ratio, new, batch), 0.0)
