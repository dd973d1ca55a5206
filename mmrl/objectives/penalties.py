"""Penalties: per-step terms added to the loss, all (N, T). `against` names the other policy."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeFloat, PositiveFloat
from mmrl.config.registry import penalty
from mmrl.core.reward_table import EQUAL
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import group_extreme, group_index, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.surrogates import step_ratio


@penalty
def k1(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001, against: str = "ref") -> Tensor:
    """KL estimator k1, the log-ratio: unbiased in value, but with the gradient of the log-probability."""
    return coef * step_ratio(new, batch, against=against)


@penalty
def kl_abs(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001, against: str = "ref") -> Tensor:
    """Size of the log-ratio (verl's kl_penalty abs): it pulls each step back, the same however far it is."""
    return coef * step_ratio(new, batch, against=against).abs()


@penalty
def k2(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001, against: str = "ref") -> Tensor:
    """KL estimator k2, half the squared log-ratio: on-policy, its gradient is that of the divergence."""
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

    Below -20, d counts as -20, because exp(-d) would exceed float32; the ratio to `old` is at most exp(20).

    Args:
        coef: Weight of the penalty (TRL's `beta`).
        against: Name of the other policy.
        use_bias_correction_kl: Multiply by the ratio to `old` (DeepSeek-V3.2, arXiv 2512.02556).
        clip_max: Upper bound of the estimate; a step above it has no gradient. verl's bound is 10, TRL has
            none.
    """
    gap = step_ratio(new, batch, against=against).clamp(min=-20.0)
    estimate = (-gap).exp() + gap - 1  # r - 1 - log r, r the other policy's probability over the new one's
    if clip_max is not None:
        estimate = estimate.clamp(max=clip_max)
    if use_bias_correction_kl:
        estimate = estimate * step_ratio(new, batch, against="old").clamp(max=20.0).exp()
    return coef * estimate


@penalty(extra={"entropy"})
def entropy_bonus(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.001) -> Tensor:
    """Reward entropy: minus the entropy of every step's distribution."""
    return -coef * new.extra["entropy"]


@penalty(extra={"entropy"})
def entropy_corridor(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 0.001,
    mean: NonNegativeFloat = 0.0,
    low: Annotated[NonNegativeFloat, AtMost("high")] = 0.5,
    high: NonNegativeFloat = 1.5,
    form: Literal["hinge", "indicator"] = "hinge",
    delta: NonNegativeFloat = 0.1,
) -> Tensor:
    """Hold every step's entropy between two multiples of its past mean (EPO, arXiv 2509.22576).

    Our reading: `hinge`, the distance to the corridor. The released `indicator` is a constant outside of
    it: it changes the loss and has no gradient.

    Args:
        coef: Weight of the penalty; the paper's falls over training (`epo_decay`).
        mean: Past mean entropy, in nats: `{name: running_mean, metrics: [entropy]}`. 0 is no past, and costs
            nothing.
        low: Lower end of the corridor, as a multiple of the mean.
        high: Upper end of the corridor, as a multiple of the mean.
        form: `hinge` or `indicator`.
        delta: Cost of a step outside of the corridor; read by `indicator` alone.
    """
    entropy = new.extra["entropy"]
    if mean <= 0:
        return torch.zeros_like(entropy)
    outside = (low * mean - entropy).clamp(min=0) + (entropy - high * mean).clamp(min=0)
    if form == "indicator":  # the bounds themselves are outside, as in the released code
        outside = delta * ((entropy <= low * mean) | (entropy >= high * mean)).to(entropy.dtype)
    return coef * outside


@penalty(extra={"reverse_kl"}, of_others={"hidden"})
def reverse_kl(
    new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 1.0, against: str = "teacher"
) -> Tensor:
    """KL from the policy to a teacher over the whole vocabulary, at every step (arXiv 2306.13649).

    On the policy's own answers this is on-policy distillation: its gradient has no variance from the sampled
    token, unlike that of `k2`. `against` names a reference with a model of its own (`vision.teacher`).
    """
    return coef * new.extra["reverse_kl"]


# ---- around the policy that sampled


@penalty
def covariance_kl(
    new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 1.0, against: str = "old"
) -> Tensor:
    """Size of the log-ratio at steps that `high_covariance` noted (KL-Cov, arXiv 2505.22617).

    It holds steps whose probability and advantage rise together, which lower the entropy fastest. It is felt
    from the second update of a collection. Raises `ValueError` where nothing was noted.
    """
    marked = batch.notes.get("high_covariance")
    if marked is None:
        if (batch.mask > 0).any():  # a process without rows has no notes
            raise ValueError(
                "`covariance_kl` reads the note `high_covariance`; put the advantage function "
                "`high_covariance` at the end of the chain"
            )
        return torch.zeros_like(new.logp)
    gap = step_ratio(new, batch, against=against).abs()
    return coef * torch.where(marked > 0, gap, 0.0)


@penalty(unit=Unit.ROW)
def lost_likelihood(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 0.2,
    gate: Literal["action", "response"] = "action",
    answer_coef: NonNegativeFloat | None = None,
    against: str = "old",
) -> Tensor:
    """Keep good answers likely: penalise falls max(0, log old - log new) (LLDS, arXiv 2512.04220).

    Only steps whose advantage is at least 0 count, and only where the log-probability of their part fell as
    a whole. It is felt from the second update of a collection.

    Args:
        coef: Weight of the penalty, the paper's lambda.
        gate: A part is a stretch without holes in the mask, such as the text between two tool results
            (`action`), or the whole answer (`response`).
        answer_coef: Weight of the final answer's steps, where it is below `coef`: 0 protects the other steps
            alone. The engine `vision.with_answer_region` notes which they are. Null: that of all steps.
        against: Policy that sampled.
    """
    kept = (batch.mask > 0) & (batch.advantage >= 0)
    lost = torch.where(kept, -step_ratio(new, batch, against=against), 0.0)
    part = torch.zeros_like(kept, dtype=torch.int64)
    if gate == "action":  # a part begins where the step before is not kept
        part = (kept & ~kept.roll(1, 1).index_fill(1, part.new_zeros(1), False)).cumsum(1)
    sums = lost.new_zeros(len(lost), lost.shape[1] + 1).scatter_add(1, part, lost.detach())
    weight = torch.full_like(lost, coef)
    if answer_coef is not None and kept.any():  # a process without rows has no notes
        if "answer" not in batch.notes:
            raise ValueError(
                "`answer_coef` of lost_likelihood reads the note `answer`; add the engine "
                "`vision.with_answer_region`, or leave it out"
            )
        weight = weight.masked_fill(batch.notes["answer"] == 1, min(answer_coef, coef))
    return weight * torch.where(sums.gather(1, part) > 0, lost.clamp(min=0), 0.0)


@penalty(unit=Unit.ROW)
def kl_hinge(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 1000.0,
    delta: NonNegativeFloat = 1e-4,
    estimator: Literal["k1", "k3"] = "k3",
    against: str = "old",
) -> Tensor:
    """Squared hinge on the KL divergence from the policy that sampled (DisCO, arXiv 2505.12366).

    coef / 2 max(KL - delta, 0)^2. Our reading: the KL is the mean over an answer, the paper's over the
    batch, whose hinge is never larger than the mean of these; so the loss does not depend on micro-batches.
    Log-ratios count within [-20, 20].

    Args:
        coef: Weight of the squared hinge, the paper's beta.
        delta: Divergence that costs nothing, in nats a step.
        estimator: With d the log-ratio of new to old: `k3` is exp(d) - 1 - d, `k1` is -d.
        against: Policy that sampled.
    """
    gap = step_ratio(new, batch, against=against).clamp(-20.0, 20.0)
    divergence = masked_mean(-gap if estimator == "k1" else torch.expm1(gap) - gap, batch.mask, -1)
    return 0.5 * coef * (divergence - delta).clamp(min=0).square()[:, None] * batch.mask


# ---- imitation


@penalty(unit=Unit.GROUP)
def sft(new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.5) -> Tensor:
    """Raise the log-probability of the best row of every group (GDRO, arXiv 2601.02036).

    `coef` is the paper's gamma. For implicit rewards that are matching errors this is the error of the best
    image; `group_mean` adds it up as the paper does. Best is the first row of the largest mean advantage.
    Our reading: a group in which all are equal has no best row.
    """
    index, counted = group_index([batch.group]), batch.mask.sum(-1) > 0
    merit = masked_mean(batch.advantage, batch.mask, -1)
    most, least = (group_extreme(merit, index, counted, largest) for largest in (True, False))
    rows = torch.arange(len(merit), dtype=torch.float64, device=merit.device)  # int64 has no infinity
    candidates = counted & (merit == most) & (most - least > EQUAL)
    best = candidates & (rows == group_extreme(rows, index, candidates, largest=False))  # first of equals
    return -coef * new.logp * best[:, None]
