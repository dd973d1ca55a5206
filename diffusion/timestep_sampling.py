"""Time types of AWM (arXiv 2509.25050): how the times of matching losses are sampled.

A rule takes the (S + 1,) schedule of the rollout and two generators: that of the row, and one that all rows
of the collection share. It gives (draws,) times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from mmrl.diffusion.schedule import shift_times


@dataclass(frozen=True)
class TimeRange:
    """Number and range of times: `fraction` of a schedule, or [`lowest`, 1] moved by `shift`."""

    draws: int
    fraction: float
    shift: float
    lowest: float


TimeRule = Callable[[TimeRange, Tensor, Generator, Generator], Tensor]


def strata(start: int, stop: int, draws: int) -> tuple[Tensor, Tensor]:
    """Cut the indices [start, stop] of a schedule into strata: their lower and upper ends, (draws,) each."""
    edges = torch.linspace(start, stop, draws + 1, dtype=torch.float64).long()
    return edges[:-1], edges[1:]


def _stratified(bounds: TimeRange, schedule: Tensor, start: int, draws: int, generator: Generator) -> Tensor:
    """Draw one time of the schedule per stratum, from the index `start` on."""
    if not len(schedule):
        raise ValueError(
            "discrete times index the schedule of the rollout, and recorded images have none; "
            "set `time_type: uniform` or `logit_normal`"
        )
    stop = int((len(schedule) - 1) * bounds.fraction)
    if stop - start < draws:
        raise ValueError(
            f"{draws} draws want as many strata, but {len(schedule) - 1} denoising steps leave "
            f"{stop - start} (fraction {bounds.fraction}); lower `draws`, or raise `num_inference_steps`"
        )
    lower, upper = strata(start, stop, draws)
    place = lower + (torch.rand(draws, generator=generator) * (upper - lower)).long()
    return schedule[place]


def discrete(bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator) -> Tensor:
    """Draw one time of the schedule per stratum."""
    return _stratified(bounds, schedule, 0, bounds.draws, shared)


def discrete_wo_init(bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator) -> Tensor:
    """Draw one time per stratum, never pure noise."""
    return _stratified(bounds, schedule, 1, bounds.draws, shared)


def discrete_with_init(bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator) -> Tensor:
    """Take pure noise, and one time per stratum of the rest."""
    if bounds.draws == 1 and len(schedule):
        return schedule[:1]
    rest = _stratified(bounds, schedule, 1, bounds.draws - 1, shared)
    return torch.cat([schedule[:1], rest])


def uniform(bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator) -> Tensor:
    """Draw stratified over [lowest, 1], shuffled within the row, then shifted."""
    spread = (torch.arange(bounds.draws) + torch.rand(bounds.draws, generator=row)) / bounds.draws
    order = torch.randperm(bounds.draws, generator=row)
    return shift_times(bounds.lowest + (1 - bounds.lowest) * spread[order], bounds.shift)


def logit_normal(bounds: TimeRange, schedule: Tensor, row: Generator, shared: Generator) -> Tensor:
    """Draw stratified quantiles of a normal, through a sigmoid, then shifted; at least 0.01."""
    quantile = (torch.arange(bounds.draws) + torch.rand(bounds.draws, generator=shared)) / bounds.draws
    normal = torch.special.ndtri(quantile.double().clamp(1e-6, 1 - 1e-6))
    return shift_times(normal.sigmoid(), bounds.shift).clamp(min=0.01).float()


TIME_TYPES = {
    rule.__name__: rule for rule in (discrete, discrete_wo_init, discrete_with_init, uniform, logit_normal)
}
