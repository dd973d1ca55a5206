"""The matching likelihood: minus the weighted flow-matching error of finished images."""

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
from mmrl.diffusion.flow_math import mean_dims, noised
from mmrl.diffusion.schedule import TIME_TYPES, TimeRange
from mmrl.diffusion.steps import Conditioning, FlowRow, segments_of

TINY = 1e-10  # keeps the slopes of the roots finite at error 0

# From the matching error and the time to minus the log-likelihood (section 3.2 of arXiv 2509.25050's code).
WEIGHTINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda error, time, power: error,
    "t": lambda error, time, power: time * error,
    "t2": lambda error, time, power: time.square() * error,
    "huber": lambda error, time, power: time * ((error + TINY).sqrt() - TINY**0.5),
    "ghuber": lambda error, time, power: time / power * ((error + TINY).pow(power) - TINY**power),
}


@likelihood
@dataclass(kw_only=True, eq=False)
class Matching:
    """Minus the flow-matching error as log-likelihood of finished images (AWM, arXiv 2509.25050).

    The error is the mean over dimensions of (v - (noise - x_0))^2, in float64. Times and noise are drawn once
    per collection. Discrete time types take times from the rollout's schedule, and all rows of a collection
    share them (our reading of "of a micro-batch", so that micro-batches do not matter); `logit_normal` is
    shared by the collection as well; `uniform` is stratified row by row. A latent frame belongs to the
    segment of the centre of its video frames, which may lie on both sides of a cut (our reading).

    Args:
        weighting: From error and time to minus the log-likelihood; the code's default `ghuber` with `power`
            0.25 behaves like a self-normalized loss.
        power: Exponent of `ghuber`.
        draws: Draws of time and noise per image.
        time_type: How times are spread.
        fraction: Share of the schedule that discrete times come from, counted from the noise.
        shift: Shift of continuous times towards noise; 1 does not move them.
        lowest: Lower end of `uniform` times, before the shift.
        shared_noise: Share times and noise within a group (Diffusion-DPO, arXiv 2311.12908).
        shared_time: Share only the times within a group (GDRO, arXiv 2601.02036: our reading).
        segments: Above 1, cut the frames of a video into as many steps per draw (DenseDPO, arXiv 2506.03517),
            as `diffusion.segment_preferences` cuts them.
    """

    outputs = frozenset({"velocity", "target", "time", "error"})
    stochastic = False

    stream: Stream
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    power: PositiveFloat = 0.25
    draws: PositiveInt = 6
    time_type: Literal["discrete", "discrete_wo_init", "discrete_with_init", "uniform", "logit_normal"] = (
        "discrete_wo_init"
    )
    fraction: PositiveShare = 0.9
    shift: PositiveFloat = 3.0
    lowest: ShareBelowOne = 0.2
    shared_noise: bool = False
    shared_time: bool = False
    segments: PositiveInt = 1

    def length(self, row: FlowRow) -> int:
        """Count steps: draws times segments."""
        return self.draws * self.segments

    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> MatchingSteps:
        """Draw times and noise for every row."""
        conditioning = Conditioning.of_rows(rows, "diffusion.matching")
        owner = owner_of_frames(rows[0], self.segments)
        bounds = TimeRange(self.draws, self.fraction, self.shift, self.lowest)
        generations: Counter[str] = Counter()
        times, seeds = [], []
        for row, uid in zip(rows, uids, strict=True):
            index = generations[uid]
            generations[uid] += 1
            one_time = self.shared_time or self.shared_noise
            own = self.stream.generator("matching times", uid, 0 if one_time else index)
            shared = self.stream.generator("matching times")
            times.append(TIME_TYPES[self.time_type](bounds, row.times, own, shared))
            noise = self.stream.generator("matching noise", uid, 0 if self.shared_noise else index)
            # Seeds instead of noise: `draws` latents per row would need more memory than the images.
            seeds.append(torch.randint(2**62, (self.draws,), generator=noise))
        clean = torch.stack([row.path[-1] for row in rows])
        unit = Unit.STEP if self.segments == 1 else Unit.ROW
        drawn = torch.stack(times), torch.stack(seeds)
        weigh = partial(WEIGHTINGS[self.weighting], power=self.power)
        return MatchingSteps(conditioning, clean, *drawn, owner, self.segments, weigh, unit)


def owner_of_frames(row: FlowRow, segments: int) -> Tensor:
    """Segment of every latent frame, (f,); raises if a segment has no frame."""
    latent = tuple(row.path.shape[1:])
    frames = latent[1] if len(latent) == 4 else 1
    if segments == 1:
        return torch.zeros(frames, dtype=torch.int64)
    if len(row.frames or (1,)) != frames:
        raise ValueError(
            f"`segments` is {segments}, but a row of {frames} latent frames has the number of video frames "
            f"of {len(row.frames)} of them; its engine must give it for all"
        )
    owner = segments_of(row.frames or (1,), segments)
    if empty := set(range(segments)) - set(owner.tolist()):
        raise ValueError(
            f"`segments` is {segments}, but of the {frames} frames in latents of {latent}, which stand for "
            f"{sum(row.frames) or 1} frames of video, none has its centre in segment "
            f"{', '.join(map(str, sorted(empty)))} (counted from 0); use fewer"
        )
    return owner


@dataclass(frozen=True, eq=False)
class MatchingSteps:
    """Finished latents (N, *L) with drawn times and noise. Noise is stored as seeds and drawn on demand.

    The `T` steps are all draws of the first segment, then all of the next, so that a segment ends with its
    last draw. Steps of one draw share the network call; with segments only whole rows can be selected.
    """

    conditioning: Conditioning
    clean: Tensor
    times: Tensor  # (N, draws)
    seeds: Tensor  # (N, draws)
    owner: Tensor  # (f,) the segment of every latent frame
    segments: int
    weigh: Callable[[Tensor, Tensor], Tensor]
    unit: Unit

    def cost(self, rows: Tensor) -> int:
        """Count network calls."""
        return len(rows) * self.times.shape[1] * self.conditioning.passes

    def __getitem__(self, cut: tuple[Tensor, slice]) -> MatchingSteps:
        rows, columns = cut
        times, seeds = (drawn[rows][:, columns] for drawn in (self.times, self.seeds))
        conditioning, clean = self.conditioning[rows], self.clean[rows]
        return dataclasses.replace(self, conditioning=conditioning, clean=clean, times=times, seeds=seeds)

    def noise(self) -> Tensor:
        """Sample the noise of every draw: (N, draws, *L), the same at every call."""
        shape, generator = self.clean.shape[1:], torch.Generator()
        drawn = [
            torch.randn(shape, generator=generator.manual_seed(seed))
            for seed in self.seeds.flatten().tolist()
        ]
        return torch.stack(drawn).view(*self.seeds.shape, *shape).to(self.clean)

    def states(self) -> tuple[Tensor, Tensor]:
        """Mix finished latents and noise: (N, draws, *L), and their times."""
        clean = self.clean[:, None].expand(*self.times.shape, *self.clean.shape[1:])
        mixed = noised(clean.flatten(0, 1), self.noise().flatten(0, 1), self.times.flatten())
        return mixed.view_as(clean), self.times

    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput:
        """Compute minus the weighted error of velocities (N, draws, *L)."""
        target = (self.noise() - self.clean[:, None]).to(velocity)  # (N, draws, *L), v = noise - x_0
        error = self.error(velocity, target)
        time = self.times.to(velocity.device).repeat(1, self.segments)  # (N, T)
        logp = -self.weigh(error, time.double()).to(velocity.dtype)
        values = {
            "velocity": lambda: torch.cat([velocity] * self.segments, 1),
            "target": lambda: torch.cat([target] * self.segments, 1),
            "time": lambda: time,
            "error": lambda: error.to(velocity.dtype),
        }
        return StepOutput(logp, {name: values[name]() for name in sorted(extra)})

    def error(self, velocity: Tensor, target: Tensor) -> Tensor:
        """Average the squared distance over dimensions, or over the frames of every segment: (N, T)."""
        squared = (velocity - target).double().square()  # float32 would lose errors below 1e-38
        if self.segments == 1:
            return mean_dims(squared, 2)
        per_frame = squared.mean((2, 4, 5))  # (N, draws, f)
        inside = (self.owner[None] == torch.arange(self.segments)[:, None]).to(per_frame)  # (segments, f)
        per_segment = per_frame @ (inside / inside.sum(1, keepdim=True)).T  # (N, draws, segments)
        return per_segment.transpose(1, 2).flatten(1)
