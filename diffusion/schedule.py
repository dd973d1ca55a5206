"""Times of denoising steps, from 1 (noise) to 0 (data)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def shift_times(times: Tensor, shift: float) -> Tensor:
    """Move times towards noise: t -> shift t / (1 + (shift - 1) t), as larger pictures want it."""
    return shift * times / (1 + (shift - 1) * times)


def unshift_times(times: Tensor, shift: float) -> Tensor:
    """Undo `shift_times`."""
    return times / (shift - (shift - 1) * times)


def scheduled_times(
    scheduler: Any, num_steps: int, *, sigmas: Tensor | None = None, mu: float | None = None
) -> Tensor:
    """Read the (S + 1,) float32 times that a scheduler of diffusers would step through; the last is 0.

    `sigmas` (S,) are times before the scheduler shifts them, where the pipeline gives its own. The scheduler
    is left as it was.
    """
    own = copy.deepcopy(scheduler)
    wanted = {} if mu is None else {"mu": mu}
    if sigmas is None:
        own.set_timesteps(num_steps, **wanted)
    else:
        own.set_timesteps(sigmas=sigmas.tolist(), **wanted)
    return torch.as_tensor(own.sigmas, dtype=torch.float32).cpu()


def scheduler_of(times: Tensor) -> Any:
    """Make a scheduler of diffusers that steps through these (S + 1,) times.

    A pipeline sets the times of its scheduler anew: call it with `sigmas=times[:-1].tolist()` as well.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=times[:-1].tolist())
    return scheduler


def check_times(times: Tensor) -> Tensor:
    """Refuse a schedule that does not fall to 0."""
    if times.ndim != 1 or len(times) < 2 or not (times.diff() < 0).all() or times[-1] != 0:
        came = [round(time, 6) for time in times.flatten().tolist()]
        raise ValueError(f"denoising times must fall strictly and end at 0, but are {came}")
    return times
