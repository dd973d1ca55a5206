"""A step is one draw of time and noise: minus the weighted error of matching the flow to a finished
picture."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat, PositiveInt, PositiveShare, ShareBelowOne
from mmrl.config.registry import likelihood
from mmrl.core.rng import Stream
from mmrl.core.step_table import StepOutput
from mmrl.core.types import Unit
from mmrl.diffusion.flow_math import noised
from mmrl.diffusion.segments import segments_of
from mmrl.diffusion.steps import Asked, FlowRow, common
from mmrl.diffusion.timestep_sampling import TIME_TYPES, Drawing, Times

TINY = 1e-10

# From the matching error and the time to minus the log-likelihood (section 3.2 of arXiv 2509.25050's code).
WEIGHTINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda error, time, power: error,
    "t": lambda error, time, power: time * error,
    "t2": lambda error, time, power: time.square() * error,
    "huber": lambda error, time, power: time * ((error + TINY).sqrt() - TINY**0.5),
    "ghuber": lambda error, time, power: time / power * ((error + TINY).pow(power) - TINY**power),
}


@likelihood
class Matching:
    """Draw times and noise for finished pictures, and take minus the matching error as log-likelihood (AWM,
    arXiv 2509.25050).

    The error is the mean over dimensions of (v - (noise - x_0))^2, in float64. `weighting` makes a likelihood
    of it; `ghuber` with `power` 0.25 is the code's default and behaves like a self-normalized loss. `draws`
    of time and noise are made once per collection; `time_type` says how times are spread: the discrete ones
    take from the rollout's schedule up to the share `fraction` of it, and all rows of a collection share
    them (our reading of "of a micro-batch", so that micro-batches do not matter). `uniform` is stratified
    over [`lowest`, 1] row by row, then shifted by `shift`; `logit_normal` is shared by the collection.

    With `shared_noise` the rows of a group share times and noise (Diffusion-DPO, arXiv 2311.12908), with
    `shared_time` only the times (GDRO, arXiv 2601.02036: our reading). `segments` above 1 cuts the frames of
    a video into as many steps per draw (DenseDPO, arXiv 2506.03517), as `diffusion.segment_preferences` cuts
    them. A latent frame belongs to the segment that holds the centre of the pixel frames it stands for, which
    may lie on both sides of a cut (our reading).
    """

    says = frozenset({"velocity", "target", "time", "error"})
    stochastic = False

    def __init__(
        self,
        *,
        stream: Stream,
        weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber",
        power: PositiveFloat = 0.25,
        draws: PositiveInt = 6,
        time_type: Literal[
            "discrete", "discrete_wo_init", "discrete_with_init", "uniform", "logit_normal"
        ] = "discrete_wo_init",
        fraction: PositiveShare = 0.9,
        shift: PositiveFloat = 3.0,
        lowest: ShareBelowOne = 0.2,
        shared_noise: bool = False,
        shared_time: bool = False,
        segments: PositiveInt = 1,
    ) -> None:
        if draws < 1 or segments < 1:
            raise ValueError(f"`draws` and `segments` must be at least 1, not {draws} and {segments}")
        if not power > 0:
            raise ValueError(f"`power` must be above 0, not {power}")
        if not 0 <= lowest < 1 or not 0 < fraction <= 1:
            raise ValueError(
                f"`lowest` must lie in [0, 1) and `fraction` in (0, 1], not {lowest} and {fraction}"
            )
        self.stream, self.draws, self.segments = stream, draws, segments
        self.weigh = partial(WEIGHTINGS[weighting], power=power)
        self.times: Times = partial(TIME_TYPES[time_type], Drawing(draws, fraction, shift, lowest))
        self.shared_noise, self.shared_time = shared_noise, shared_noise or shared_time

    def length(self, row: FlowRow) -> int:
        """Count the draws, times segments."""
        return self.draws * self.segments

    def _owners(self, row: FlowRow) -> Tensor:
        """Find the segment of every latent frame: (f,)."""
        latent = tuple(row.path.shape[1:])
        frames = latent[1] if len(latent) == 4 else 1
        if self.segments > frames:
            raise ValueError(
                f"`segments` is {self.segments}, but latents of {latent} have {frames} frames to cut "
                f"between; ask for at most {frames}"
            )
        if self.segments == 1:
            return torch.zeros(frames, dtype=torch.int64)
        if len(row.frames) != frames:
            raise ValueError(
                f"`segments` is {self.segments}, but a row of {frames} latent frames says of "
                f"{len(row.frames)} how many frames of video they stand for; its engine must say it of all"
            )
        owner = segments_of(row.frames, self.segments)
        empty = sorted(set(range(self.segments)) - set(owner.tolist()))
        if empty:
            raise ValueError(
                f"`segments` is {self.segments}, but of the {frames} latent frames of a video of "
                f"{sum(row.frames)} frames none has its centre in segment {', '.join(map(str, empty))} "
                "(counted from 0); ask for fewer"
            )
        return owner

    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> MatchingSteps:
        """Draw times and noise for every row."""
        common(rows, "diffusion.matching")
        owner = self._owners(rows[0])
        seen: Counter[str] = Counter()
        times, seeds = [], []
        for row, uid in zip(rows, uids, strict=True):
            index, seen[uid] = seen[uid], seen[uid] + 1
            mine = self.stream.generator("matching times", uid, 0 if self.shared_time else index)
            all_rows = self.stream.generator("matching times")
            times.append(self.times(row.times, mine, all_rows))
            noisy = self.stream.generator("matching noise", uid, 0 if self.shared_noise else index)
            seeds.append(torch.randint(2**62, (self.draws,), generator=noisy))
        first = rows[0]
        return MatchingSteps(
            Asked.of([row.condition for row in rows], first.guidance, first.passes),
            torch.stack([row.path[-1] for row in rows]),
            torch.stack(times),
            torch.stack(seeds),
            owner,
            self.segments,
            self.weigh,
            Unit.STEP if self.segments == 1 else Unit.ROW,
        )


@dataclass(frozen=True, eq=False)
class MatchingSteps:
    """Finished latents (N, *L) and what was drawn for them. Noise is kept as seeds and drawn where it is
    needed.

    The `T` steps are all draws of the first segment, then those of the next, so that a segment ends where its
    last draw stands. Steps of one draw share the network call; with segments only whole rows are cut.
    """

    asked: Asked
    clean: Tensor
    times: Tensor  # (N, draws)
    seeds: Tensor  # (N, draws)
    owner: Tensor  # (f,) the segment of every latent frame
    segments: int
    weigh: Callable[[Tensor, Tensor], Tensor]
    unit: Unit = Unit.STEP

    def cost(self, rows: Tensor) -> int:
        """Count network calls."""
        return len(rows) * self.times.shape[1] * self.asked.passes

    def __getitem__(self, cut: tuple[Tensor, slice]) -> MatchingSteps:
        rows, columns = cut
        times, seeds = (kept[rows][:, columns] for kept in (self.times, self.seeds))
        return dataclasses.replace(
            self, asked=self.asked[rows], clean=self.clean[rows], times=times, seeds=seeds
        )

    def noise(self) -> Tensor:
        """Draw the noise of every draw: (N, draws, *L), the same at every call."""
        shape = self.clean.shape[1:]
        drawn = [
            torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            for seed in self.seeds.flatten().tolist()
        ]
        return torch.stack(drawn).view(*self.seeds.shape, *shape).to(self.clean)

    def states(self) -> tuple[Tensor, Tensor]:
        """Mix pictures and noise."""
        clean = self.clean[:, None].expand(*self.times.shape, *self.clean.shape[1:])
        mixed = noised(clean.flatten(0, 1), self.noise().flatten(0, 1), self.times.flatten())
        return mixed.view_as(clean), self.times

    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput:
        """Measure how far the velocities are from what leads to the pictures."""
        target = (self.noise() - self.clean[:, None]).to(velocity)
        error = self._error(velocity, target)
        time = self.times.to(velocity.device).repeat(1, self.segments)
        logp = -self.weigh(error, time.double()).to(velocity.dtype)
        said = {
            "velocity": lambda: torch.cat([velocity] * self.segments, 1),
            "target": lambda: torch.cat([target] * self.segments, 1),
            "time": lambda: time,
            "error": lambda: error.to(velocity.dtype),
        }
        return StepOutput(logp, {name: said[name]() for name in sorted(extra)})

    def _error(self, velocity: Tensor, target: Tensor) -> Tensor:
        """Average the squared distance over dimensions, or over the frames of every segment: (N, T)."""
        squared = (velocity - target).double().square()
        if self.segments == 1:
            return squared.flatten(2).mean(-1)
        per_frame = squared.mean((2, 4, 5))  # (N, draws, frames)
        inside = (self.owner[None] == torch.arange(self.segments)[:, None]).to(per_frame)
        per_segment = per_frame @ (inside / inside.sum(1, keepdim=True)).T  # (N, draws, segments)
        return per_segment.transpose(1, 2).flatten(1)
