"""Stochastic solvers of the flow: each step is a draw from a Gaussian whose density is known.

A solver takes latents and velocities (B, *L), the times (B,) of a step's start and end, and the schedule's
`second` time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat, PositiveShare
from mmrl.config.registry import solver
from mmrl.diffusion.flow_math import Gaussian, along, clean_estimate, noise_estimate


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
    """Compute a step of the SDE that has the flow's marginals (Flow-GRPO, arXiv 2505.05470).

    The noise per square root of time is s_t = noise_level sqrt(t / (1 - t)). At t = 1 this is infinite, so
    1 - t is replaced by 1 minus the schedule's `second` time. The first step then has the standard deviation
    `noise_level`. Near t = 1, s_t^2 grows as fast as the steps shrink, so more steps do not remove the
    discretisation error: the latents there have the flow's mean, but at noise level 0.7 a variance that is up
    to a tenth too large. This error fades towards the data.
    """
    dt = following - time
    scale = noise_level * (time / (1 - torch.where(time == 1, second, time))).sqrt()  # s_t
    # drift = v + s^2 / (2 t) (x + (1 - t) v), since the score is -(x + (1 - t) v) / t
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
    """Compute a constant-noise SDE step with the flow's marginals (DanceGRPO, arXiv 2505.07818)."""
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
    """Compute a step that redraws part of the noise, at its scheduled level (Flow-CPS, arXiv 2509.05952).

    A `noise_level` of 1 replaces all of the noise. The log-density is unnormalized, as published. The last
    step, to time 0, has no noise and log-density 0.
    """
    std = following * math.sin(noise_level * math.pi / 2)  # noise_level: angle as a fraction of 90 degrees
    # Old and new noise are independent: their variances add up to following^2.
    old = (following.square() - std.square()).clamp(min=0).sqrt()
    mean = along(1 - following, latents) * clean_estimate(latents, velocity, time)
    mean = mean + along(old, latents) * noise_estimate(latents, velocity, time)
    return Gaussian(mean, std.to(latents), normalized=False)
