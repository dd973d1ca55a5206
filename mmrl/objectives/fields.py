"""Pieces that read the outputs of a flow policy: means, velocities and targets, (N, T, ...).

N rows, T steps. All axes after (N, T) are averaged, in float64. `std`, `dt` and `time` are (N, T): the
standard deviation of a stochastic step, its (negative) time change, and its start, 1 (noise) to 0 (data).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, PositiveFloat
from mmrl.config.registry import penalty, ratio, step_weight, surrogate
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import masked_mean


def mean_square(field: Tensor) -> Tensor:
    """Average the squares of (N, T, ...) over the latent axes; returns (N, T)."""
    square = field.double().square()
    return square.flatten(2).mean(-1) if square.dim() > 2 else square


def _distance(name: str, new: StepOutput, other: StepOutput) -> Tensor:
    """Compute the mean squared distance between the outputs `name` of two policies: (N, T)."""
    return mean_square(new.extra[name].double() - other.extra[name].double())


def _counted(values: Tensor, batch: Batch) -> Tensor:
    """Set `values` to 1 at steps outside the mask, to avoid divisions by 0."""
    return torch.where(batch.mask > 0, values.double(), 1.0)


# ---- penalties


@penalty(extra={"mean", "std", "dt"}, of_others={"mean"})
def gaussian_kl(
    new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.04, against: str = "ref", kl_dt: bool = False
) -> Tensor:
    """KL divergence of two Gaussian steps with the same deviation s (Flow-GRPO, arXiv 2505.05470).

    It is the mean squared distance of the two means, divided by 2 s^2.

    Args:
        coef: Weight of the penalty.
        against: Name of the other policy.
        kl_dt: True: s is std, which gives the exact divergence (the older form, needed for Flow-CPS). False:
            s is std / sqrt(-dt), as in the code since July 2025.
    """
    variance = _counted(new.extra["std"], batch).square()
    if not kl_dt:
        variance = variance / _counted(-new.extra["dt"], batch)  # (std / sqrt(-dt))^2
    gap = _distance("mean", new, batch.by(against, new))
    return (coef * gap / (2 * variance)).to(new.logp.dtype)


@penalty(extra={"velocity", "time"}, of_others={"velocity"})
def velocity_mse(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 0.003,
    against: str = "ref",
    weighting: Literal["uniform", "elbo"] = "uniform",
    noise_level: PositiveFloat = 0.7,
) -> Tensor:
    """Mean squared distance between the velocities of two policies (AWM, arXiv 2509.25050; DiffusionNFT).

    Args:
        coef: Weight of the penalty.
        against: Name of the other policy.
        weighting: `uniform`: no division. `elbo`: divide by 2 s_t^2 with s_t = noise_level sqrt(t / (1 - t)),
            where t is at most 0.99 in 1 - t.
        noise_level: Noise level in s_t of `elbo`, above 0.
    """
    gap = _distance("velocity", new, batch.by(against, new))
    if weighting == "elbo":
        time = _counted(new.extra["time"], batch)
        gap = gap / (2 * noise_level**2 * time / (1 - time.clamp(max=0.99)))  # 2 s_t^2
    return (coef * gap).to(new.logp.dtype)


# ---- DiffusionNFT

ADV_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda advantage: advantage,
    "positive_only": lambda advantage: advantage.clamp(min=0),
    "negative_only": lambda advantage: advantage.clamp(max=0),
    "one_only": lambda advantage: (advantage > 0).double(),
    "binary": lambda advantage: advantage.sign(),
}


@surrogate(extra={"velocity", "target", "time"}, of_others={"velocity"})
def diffusion_nft(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    beta: PositiveFloat = 1.0,
    max_advantage: PositiveFloat = 5.0,
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all",
    against: str = "old",
) -> Tensor:
    """DiffusionNFT: regress to the velocity of good samples, away from bad ones (arXiv 2509.16117).

    It does not read the ratio. With r = 1/2 + A / (2 max_advantage) in [0, 1] and v+- = v_old +- beta (v -
    v_old), the loss is max_advantage (r L+ + (1 - r) L-) / beta. L+- is the squared distance of x_t - t v+-
    from the image, divided by its mean absolute distance (no gradient, at least 1e-5).

    Args:
        beta: Strength of the mirrored velocity, above 0.
        max_advantage: Size of the advantage at which r reaches 0 or 1.
        adv_mode: As in the released code. `all`: no change. `positive_only`: set negative advantages to 0.
            `negative_only`: set positive advantages to 0. `one_only`: set positive advantages to 1, others to
            0. `binary`: take the sign.
        against: The policy that sampled; in the paper a moving average of weights, `rollout: {policy: ema}`.
    """
    velocity, target = new.extra["velocity"].double(), new.extra["target"].double()
    old = batch.by(against, new).extra["velocity"].double()
    time = new.extra["time"].double()
    advantage = ADV_MODES[adv_mode](batch.advantage.double())
    share = (0.5 + advantage / (2 * max_advantage)).clamp(0, 1)  # the paper's r, a probability of optimality

    def matched(sign: float) -> Tensor:
        # The distance of x_t - t v from x_0 is t times that of v from its target.
        away = time[(..., *[None] * (velocity.dim() - 2))] * (old + sign * beta * (velocity - old) - target)
        norm = away.detach().abs().flatten(2).mean(-1).clamp(min=1e-5)
        return mean_square(away) / norm

    loss = max_advantage * (share * matched(1.0) + (1 - share) * matched(-1.0)) / beta
    return loss.to(new.logp.dtype)


# ---- GRPO-Guard


@ratio(extra={"mean", "std"}, of_others={"mean"})
def grpo_guard_ratio(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Centred log-ratio of Gaussian steps with one scale for all steps (GRPO-Guard, arXiv 2510.22319).

    It is (log-ratio + gap / (2 std^2)) * std. gap is the squared distance of the new from the old mean,
    averaged over elements: under the sampling policy the expected log-ratio is -gap / (2 std^2).
    """
    old = batch.by(against, new)
    std = _counted(new.extra["std"], batch)
    drift = _distance("mean", new, old) / (2 * std)  # gap / (2 std^2), times std
    return ((new.logp - old.logp) * std + drift).to(new.logp.dtype) * batch.mask


@step_weight(others={"old"}, of_others={"dt"})
def by_step_size(batch: Batch) -> Tensor:
    """Weigh the steps of a row by 1 / (mean of sqrt(-dt))^2 (GRPO-Guard's second form, arXiv 2510.22319)."""
    mean = masked_mean((-batch.others["old"].extra["dt"]).sqrt(), batch.mask, -1)
    mean = torch.where(mean > 0, mean, 1.0)  # for rows without a step
    return (1 / mean.square())[:, None].expand_as(batch.mask)
