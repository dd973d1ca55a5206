"""Arithmetic of the flow: x_t = (1 - t) x_0 + t noise, with velocity v = noise - x_0.

Times are (B,) or scalars; latents and velocities are (B, *L). Latents are float32 or float64, whatever dtype
the network computes in. Results have the dtype of the latents, or of the times if they depend only on times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
Flow = Callable[[Tensor, Tensor], Tensor]  # maps latents (B, *L) and times (B,) to velocities (B, *L)


def along(times: Tensor, latents: Tensor) -> Tensor:
    """Reshape times (B,) to (B, 1, ...), so that they broadcast over latents."""
    return times.to(latents).view(-1, *[1] * (latents.ndim - 1))


def mean_dims(values: Tensor, kept: int = 1) -> Tensor:
    """Average over all axes after the first `kept` axes."""
    return values.flatten(kept).mean(-1)


def noised(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Mix data and noise: x_t = (1 - t) x_0 + t noise."""
    return (1 - along(time, clean)) * clean + along(time, clean) * noise


def clean_estimate(latents: Tensor, velocity: Tensor, time: Tensor) -> Tensor:
    """Estimate the data in one step: x_0 = x_t - t v."""
    return latents - along(time, latents) * velocity  # x_t - t (noise - x_0) = x_0


def noise_estimate(latents: Tensor, velocity: Tensor, time: Tensor) -> Tensor:
    """Estimate the noise in one step: x_1 = x_t + (1 - t) v."""
    return latents + (1 - along(time, latents)) * velocity  # x_t + (1 - t) (noise - x_0) = noise


def euler_step(
    latents: Tensor, velocity: Tensor, time: Tensor, following: Tensor, flow: Flow | None = None
) -> Tensor:
    """Take an Euler step from `time` to `following`; `flow` is not called."""
    return latents + along(following - time, latents) * velocity  # following < time: towards the data


def heun_step(latents: Tensor, velocity: Tensor, time: Tensor, following: Tensor, flow: Flow) -> Tensor:
    """Take a second-order Heun step: average the velocities at the start and the end of an Euler step.

    Calls `flow` once. The last step, to time 0, stays an Euler step, since networks are not trained there.
    """
    ahead = euler_step(latents, velocity, time, following)
    if not (following > 0).all():
        return ahead
    return euler_step(latents, 0.5 * (velocity + flow(ahead, following)), time, following)


ODE_STEPS = {"euler": euler_step, "heun": heun_step}


@dataclass(frozen=True)
class Gaussian:
    """Gaussian distribution of the next latents in a stochastic step: `mean` (B, *L), `std` (B,).

    If not `normalized`, the log-density is minus the squared distance to the mean, without the variance.
    """

    mean: Tensor
    std: Tensor
    normalized: bool = True

    def draw(self, noise: Tensor) -> Tensor:
        """Sample the next latents from unit noise (B, *L)."""
        return self.mean + along(self.std, self.mean) * noise

    def logp(self, following: Tensor) -> Tensor:
        """Compute the log-density of the next latents, as a mean over their dimensions: (B,)."""
        distance = mean_dims((following.detach() - self.mean).square())
        if not self.normalized:
            return -distance
        return -distance / (2 * self.std.square()) - self.std.log() - LOG_SQRT_2PI
