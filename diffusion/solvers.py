"""Stochastic steps that keep the marginals of the flow, or its share of noise, each with the density that it
draws from.

A solver takes latents and velocities (B, *L), the times (B,) of a step's start and end, and the `second` time
of the schedule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat, PositiveShare
from mmrl.config.registry import solver
from mmrl.diffusion.flow_math import Gaussian, along, clean_estimate, noise_estimate


def check_noise(noise_level: float, most: float = math.inf) -> None:
    """Refuse a step without noise, which has no log-density, and one of more noise than there is."""
    if noise_level > most:
        raise ValueError(f"`noise_level` is {noise_level}, but at {most} all of the noise is new already")
    if not noise_level > 0:
        raise ValueError(
            f"`noise_level` is {noise_level}, but a step without noise has no log-density; leave `solver` "
            "out for deterministic rollouts"
        )


@solver
def flow_sde(
    latents: Tensor,
    velocity: Tensor,
    time: Tensor,
    following: Tensor,
    second: Tensor,
    *,
    noise_level: PositiveFloat = 0.7,
) -> Gaussian:
    """Take a step of the stochastic twin of the flow, with its marginals (Flow-GRPO, arXiv 2505.05470).

    The noise is s_t = noise_level sqrt(t / (1 - t)) per root of time. At t = 1, where that is infinite, 1 -
    t takes the value of the schedule's `second` time; then the first step has the deviation `noise_level`.
    Near there the noise grows as fast as steps shrink: the mean is kept, the variance is up to a tenth too
    large at noise level 0.7, and that fades on the way to the data.
    """
    check_noise(noise_level)
    dt = following - time
    scale = noise_level * (time / (1 - torch.where(time == 1, second, time))).sqrt()
    half = scale.square() / (2 * time)
    mean = latents * along(1 + half * dt, latents) + velocity * along((1 + half * (1 - time)) * dt, latents)
    return Gaussian(mean, (scale * (-dt).sqrt()).to(latents))


@solver
def dance_sde(
    latents: Tensor,
    velocity: Tensor,
    time: Tensor,
    following: Tensor,
    second: Tensor,
    *,
    noise_level: PositiveFloat = 0.3,
) -> Gaussian:
    """Take a stochastic step of constant noise, with the marginals of the flow (DanceGRPO, arXiv
    2505.07818)."""
    check_noise(noise_level)
    dt = following - time
    # score = -x_1 / t, with x_1 the predicted noise
    drift = velocity + 0.5 * noise_level**2 * noise_estimate(latents, velocity, time) / along(time, latents)
    return Gaussian(latents + along(dt, latents) * drift, (noise_level * (-dt).sqrt()).to(latents))


@solver
def cps(
    latents: Tensor,
    velocity: Tensor,
    time: Tensor,
    following: Tensor,
    second: Tensor,
    *,
    noise_level: PositiveShare = 0.8,
) -> Gaussian:
    """Replace a part of the noise so that exactly `following` of it is left (Flow-CPS, arXiv 2509.05952).

    `noise_level` 1 replaces all of it. The log-density is unnormalized, as published. A last step has no
    noise and log-density 0.
    """
    check_noise(noise_level, most=1.0)
    std = following * math.sin(noise_level * math.pi / 2)
    kept = (following.square() - std.square()).clamp(min=0).sqrt()
    mean = along(1 - following, latents) * clean_estimate(latents, velocity, time)
    mean = mean + along(kept, latents) * noise_estimate(latents, velocity, time)
    return Gaussian(mean, std.to(latents), normalized=False)
