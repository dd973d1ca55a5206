"""How the times of matching are drawn: the time types of AWM (arXiv 2509.25050).

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
class Drawing:
    """How many times are drawn, and from where: the share `fraction` of a schedule, or [`lowest`, 1] moved by
    `shift`."""

    draws: int
    fraction: float
    shift: float
    lowest: float


Times = Callable[[Drawing, Tensor, Generator, Generator], Tensor]


def strata(start: int, stop: int, draws: int) -> tuple[Tensor, Tensor]:
    """Cut the places [start, stop] of a schedule into strata: their lower and upper ends, (draws,) each."""
    edges = torch.linspace(start, stop, draws + 1, dtype=torch.float64).long()
    return edges[:-1], edges[1:]


def _check_recorded(schedule: Tensor) -> None:
    if not len(schedule):
        raise ValueError(
            "discrete times index the schedule of the rollout, and recorded pictures have none; "
            "set `time_type: uniform` or `logit_normal`"
        )


def _stratified(how: Drawing, schedule: Tensor, start: int, draws: int, generator: Generator) -> Tensor:
    _check_recorded(schedule)
    stop = int((len(schedule) - 1) * how.fraction)
    if stop - start < draws:
        raise ValueError(
            f"{draws} draws want as many strata, but {len(schedule) - 1} denoising steps leave "
            f"{stop - start} (fraction {how.fraction}); lower `draws`, or raise `num_inference_steps`"
        )
    lower, upper = strata(start, stop, draws)
    place = lower + (torch.rand(draws, generator=generator) * (upper - lower)).long()
    return schedule[place]


def discrete(how: Drawing, schedule: Tensor, mine: Generator, all_rows: Generator) -> Tensor:
    """Draw one time of the schedule per stratum."""
    return _stratified(how, schedule, 0, how.draws, all_rows)


def discrete_wo_init(how: Drawing, schedule: Tensor, mine: Generator, all_rows: Generator) -> Tensor:
    """Draw one time per stratum, never pure noise."""
    return _stratified(how, schedule, 1, how.draws, all_rows)


def discrete_with_init(how: Drawing, schedule: Tensor, mine: Generator, all_rows: Generator) -> Tensor:
    """Take pure noise, and one time per stratum behind it."""
    _check_recorded(schedule)
    if how.draws == 1:
        return schedule[:1]
    return torch.cat([schedule[:1], _stratified(how, schedule, 1, how.draws - 1, all_rows)])


def uniform(how: Drawing, schedule: Tensor, mine: Generator, all_rows: Generator) -> Tensor:
    """Draw stratified over [lowest, 1], shuffled within the row, then shifted."""
    spread = (torch.arange(how.draws) + torch.rand(how.draws, generator=mine)) / how.draws
    order = torch.randperm(how.draws, generator=mine)
    return shift_times(how.lowest + (1 - how.lowest) * spread[order], how.shift)


def logit_normal(how: Drawing, schedule: Tensor, mine: Generator, all_rows: Generator) -> Tensor:
    """Draw stratified quantiles of a normal, through a sigmoid, then shifted; at least 0.01."""
    quantile = (torch.arange(how.draws) + torch.rand(how.draws, generator=all_rows)) / how.draws
    normal = torch.special.ndtri(quantile.double().clamp(1e-6, 1 - 1e-6))
    return shift_times(normal.sigmoid(), how.shift).clamp(min=0.01).float()


TIME_TYPES = {
    rule.__name__: rule for rule in (discrete, discrete_wo_init, discrete_with_init, uniform, logit_normal)
}
