"""How the times of matching are drawn: the time types of AWM (arXiv 2509.25050)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from mmrl.diffusion.schedule import shift_times

Times = Callable[[Tensor, int, Generator, Generator], Tensor]


def strata(start: int, stop: int, draws: int) -> tuple[Tensor, Tensor]:
    """Cut the places [start, stop] of a schedule into strata: their lower and upper ends, (draws,) each."""
    edges = torch.linspace(start, stop, draws + 1, dtype=torch.float64).long()
    return edges[:-1], edges[1:]


def _stratified(schedule: Tensor, start: int, draws: int, fraction: float, generator: Generator) -> Tensor:
    if not len(schedule):
        raise ValueError(
            "discrete times index the schedule of the rollout, and recorded pictures have none; "
            "set `time_type: uniform` or `logit_normal`"
        )
    stop = int((len(schedule) - 1) * fraction)
    if stop - start < draws:
        raise ValueError(
            f"{draws} draws want as many strata, but {len(schedule) - 1} denoising steps leave {stop - start} "
            f"(fraction {fraction}); lower `draws`, or raise `num_inference_steps` of the engine"
        )
    lower, upper = strata(start, stop, draws)
    place = lower + (torch.rand(draws, generator=generator) * (upper - lower)).long()
    return schedule[place]


def discrete(
    schedule: Tensor,
    draws: int,
    mine: Generator,
    all_rows: Generator,
    *,
    fraction: float,
    shift: float,
    lowest: float,
) -> Tensor:
    """Draw one time of the schedule per stratum."""
    return _stratified(schedule, 0, draws, fraction, all_rows)


def discrete_wo_init(
    schedule: Tensor,
    draws: int,
    mine: Generator,
    all_rows: Generator,
    *,
    fraction: float,
    shift: float,
    lowest: float,
) -> Tensor:
    """Draw one time per stratum, never pure noise."""
    return _stratified(schedule, 1, draws, fraction, all_rows)


def discrete_with_init(
    schedule: Tensor,
    draws: int,
    mine: Generator,
    all_rows: Generator,
    *,
    fraction: float,
    shift: float,
    lowest: float,
) -> Tensor:
    """Take pure noise, and one time per stratum behind it."""
    if draws == 1:
        return schedule[:1]
    return torch.cat([schedule[:1], _stratified(schedule, 1, draws - 1, fraction, all_rows)])


def uniform(
    schedule: Tensor,
    draws: int,
    mine: Generator,
    all_rows: Generator,
    *,
    fraction: float,
    shift: float,
    lowest: float,
) -> Tensor:
    """Draw stratified over [lowest, 1], shuffled within the row, then shifted."""
    spread = (torch.arange(draws) + torch.rand(draws, generator=mine)) / draws
    return shift_times(lowest + (1 - lowest) * spread[torch.randperm(draws, generator=mine)], shift)


def logit_normal(
    schedule: Tensor,
    draws: int,
    mine: Generator,
    all_rows: Generator,
    *,
    fraction: float,
    shift: float,
    lowest: float,
) -> Tensor:
    """Draw stratified quantiles of a normal, through a sigmoid, then shifted; at least 0.01."""
    quantile = (torch.arange(draws) + torch.rand(draws, generator=all_rows)) / draws
    normal = torch.special.ndtri(quantile.double().clamp(1e-6, 1 - 1e-6))
    return shift_times(normal.sigmoid(), shift).clamp(min=0.01).float()


TIME_TYPES = {
    rule.__name__: rule for rule in (discrete, discrete_wo_init, discrete_with_init, uniform, logit_normal)
}
