"""Times of denoising steps, from 1 (noise) to 0 (data)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor


def shift_times(times: Tensor, shift: float) -> Tensor:
    """Shift times towards noise for larger images: t -> shift t / (1 + (shift - 1) t)."""
    return shift * times / (1 + (shift - 1) * times)


def scheduled_times(
    scheduler: Any, num_steps: int, *, sigmas: Tensor | None = None, mu: float | None = None
) -> Tensor:
    """Compute the times of a diffusers scheduler for S steps, (S + 1,) float32; the last is 0.

    `sigmas` (S,) are times before the scheduler shifts them, for pipelines that pass their own; `mu` is the
    shift of schedules that depend on the image's size. The scheduler itself is not changed.
    """
    own = copy.deepcopy(scheduler)  # set_timesteps has side effects
    options = {} if mu is None else {"mu": mu}
    if sigmas is None:
        own.set_timesteps(num_steps, **options)
    else:
        own.set_timesteps(sigmas=sigmas.numpy(), **options)
    return torch.as_tensor(own.sigmas, dtype=torch.float32).cpu()


def check_scheduler(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless class name and settings show that a scheduler is for flow matching."""
    predicts = settings.get("use_flow_sigmas") and settings.get("prediction_type") == "flow_prediction"
    if not name.startswith("FlowMatch") and not predicts:
        raise ValueError(
            f"its scheduler is '{name}' (prediction_type {settings.get('prediction_type')}, use_flow_sigmas "
            f"{settings.get('use_flow_sigmas', False)}), which is no scheduler of flow matching; give the "
            "pipeline a FlowMatchEulerDiscreteScheduler, or the scheduler that the model was published with"
        )
    if "Heun" in name:  # a Heun scheduler lists every time twice
        raise ValueError(
            f"its scheduler is '{name}'; give the pipeline a FlowMatchEulerDiscreteScheduler, and set "
            "`ode: heun` of the engine `diffusion.denoise`"
        )


def size_shift(scheduler: Any, shape: tuple[int, ...], patch: int) -> float | None:
    """Compute the shift `mu` of a schedule that depends on the image's size; None for other schedules.

    `mu` is linear in the number of tokens, which are patches of side `patch` in a latent (C, h, w). The
    scheduler's configuration gives two points of the line, each a sequence length and its shift.
    """
    settings = scheduler.config
    if not settings.get("use_dynamic_shifting", False):
        return None
    num_tokens = math.prod(side // patch for side in shape[-2:])
    low, high = settings.get("base_image_seq_len", 256), settings.get("max_image_seq_len", 4096)
    least, most = settings.get("base_shift", 0.5), settings.get("max_shift", 1.16)
    slope = (most - least) / (high - low)
    # As in diffusers: the line through (low, least) and (high, most); the scheduler shifts by exp(mu).
    return num_tokens * slope + least - slope * low


def check_times(times: Tensor) -> Tensor:
    """Return `times`; raises ValueError unless they fall strictly to 0 and start at 1 or below."""
    falls = times.ndim == 1 and len(times) > 1 and bool((times.diff() < 0).all())
    if not falls or times[-1] != 0:
        rounded = [round(time, 6) for time in times.flatten().tolist()]
        raise ValueError(f"denoising times must fall strictly and end at 0, but are {rounded}")
    if times[0] > 1:
        raise ValueError(
            f"denoising times are shares of noise, but the scheduler begins at {float(times[0]):.6g}; give "
            "the pipeline a scheduler of flow matching without sigmas of another kind"
        )
    return times


# ---- the time types of AWM (arXiv 2509.25050)


@dataclass(frozen=True)
class TimeRange:
    """Where times are drawn: in the first `fraction` of a schedule, or in [`lowest`, 1], then shifted."""

    draws: int
    fraction: float
    shift: float
    lowest: float


TimeRule = Callable[[TimeRange, Tensor, Generator, Generator], Tensor]


def strata(start: int, stop: int, draws: int) -> tuple[Tensor, Tensor]:
    """Cut schedule indices [start, stop] into `draws` strata; returns lower and upper ends, (draws,)."""
    edges = torch.linspace(start, stop, draws + 1, dtype=torch.float64).long()
    return edges[:-1], edges[1:]


def discrete(
    bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator, start: int = 0, taken: int = 0
) -> Tensor:
    """Return the schedule's first `taken` times, then one drawn time per stratum from index `start` on."""
    if not len(schedule):
        raise ValueError(
            "discrete times index the schedule of the rollout, and recorded images have none; "
            "set `time_type: uniform` or `logit_normal`"
        )
    draws = bounds.draws - taken
    if not draws:
        return schedule[:taken]
    stop = int((len(schedule) - 1) * bounds.fraction)
    if stop - start < draws:
        raise ValueError(
            f"{draws} draws want as many strata, but {len(schedule) - 1} denoising steps leave "
            f"{stop - start} (fraction {bounds.fraction}); "
            + ("lower `draws`, or raise" if stop > start else "raise")
            + f" `num_inference_steps` to at least {math.ceil((start + draws) / bounds.fraction)}"
        )
    lower, upper = strata(start, stop, draws)
    index = lower + (torch.rand(draws, generator=shared) * (upper - lower)).long()  # upper ends excluded
    return torch.cat([schedule[:taken], schedule[index]])


def uniform(bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator) -> Tensor:
    """Draw stratified uniform times in [lowest, 1], shuffle them within the row, and shift them."""
    # (i + u) / draws is uniform in the i-th of `draws` equal strata of [0, 1].
    spread = (torch.arange(bounds.draws) + torch.rand(bounds.draws, generator=row)) / bounds.draws
    order = torch.randperm(bounds.draws, generator=row)
    return shift_times(bounds.lowest + (1 - bounds.lowest) * spread[order], bounds.shift)


def logit_normal(bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator) -> Tensor:
    """Draw logit-normal times at stratified quantiles, and shift them; times are at least 0.01."""
    quantile = (torch.arange(bounds.draws) + torch.rand(bounds.draws, generator=shared)) / bounds.draws
    normal = torch.special.ndtri(quantile.double().clamp(1e-6, 1 - 1e-6))  # quantiles at 0 and 1 are infinite
    return shift_times(normal.sigmoid(), bounds.shift).clamp(min=0.01).float()


TIME_TYPES: dict[str, TimeRule] = {
    "discrete": discrete,
    "discrete_wo_init": partial(discrete, start=1),  # never the first time (pure noise)
    "discrete_with_init": partial(discrete, start=1, taken=1),  # always the first time (pure noise)
    "uniform": uniform,
    "logit_normal": logit_normal,
}
