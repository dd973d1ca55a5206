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
from mmrl.core.types import Steps, Unit
from mmrl.diffusion.flow_math import mean_dims, noised
from mmrl.diffusion.schedule import TIME_TYPES, TimeRange
from mmrl.diffusion.steps import Conditioning, FlowRow, collate_sizes, segments_of

TINY = 1e-10  # keeps the gradients of the roots finite at error 0

# Weightings: (error, time, `power`) -> minus log-likelihood, as in the code of arXiv 2509.25050.
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
    per training step. Discrete time types take times from the rollout's schedule. All rows of a training step
    share discrete and `logit_normal` times (published: all rows of a micro-batch; our reading makes results
    independent of its size); `uniform` times are stratified per row. If a cut between segments falls inside a
    latent frame, the frame belongs to the segment of its centre (our reading).

    Args:
        weighting: Function of error and time that gives minus the log-likelihood. `ghuber`, the default in
            the paper's code, behaves with `power` 0.25 like a self-normalized loss.
        power: Exponent of `ghuber`.
        draws: Number of draws of time and noise per image.
        time_type: Distribution of the times.
        fraction: Fraction of the schedule, from its noise end, that discrete times are drawn from.
        shift: Shift of continuous times towards noise; 1: none.
        lowest: Lower end of `uniform` times, before the shift.
        shared_noise: Share times and noise within a group (Diffusion-DPO, arXiv 2311.12908).
        shared_time: Share only the times within a group (GDRO, arXiv 2601.02036: our reading).
        segments: Number of segments that a video is cut into, as in `diffusion.segment_preferences`
            (DenseDPO, arXiv 2506.03517); each draw then has one training step per segment. 1: no cut.
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
        """Count the training steps of a row: draws times segments."""
        return self.draws * self.segments

    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> Steps:
        """Draw times and noise seeds for every row, and batch the rows."""
        conditioning = Conditioning.of_rows(rows, "diffusion.matching")
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
            # Store seeds, not noise: `draws` latents per row would take more memory than the images.
            seeds.append(torch.randint(2**62, (self.draws,), generator=noise))
        unit = Unit.STEP if self.segments == 1 else Unit.ROW
        weigh = partial(WEIGHTINGS[self.weighting], power=self.power)

        def make(places: list[int]) -> MatchingSteps:
            chosen, owner = (
                conditioning[torch.tensor(places)],
                owner_of_frames(rows[places[0]], self.segments),
            )
            clean = torch.stack([rows[i].path[-1] for i in places])
            drawn = (torch.stack([values[i] for i in places]) for values in (times, seeds))
            return MatchingSteps(chosen, clean, *drawn, owner, self.segments, weigh, unit)

        return collate_sizes(rows, make)


def owner_of_frames(row: FlowRow, segments: int) -> Tensor:
    """Return the segment index of every latent frame, (f,); raises if a segment has no frame."""
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
    """Finished latents of N rows with drawn times and noise; noise is stored as seeds.

    The T steps of a row are all draws of the first segment, then all draws of the next, and so on. Steps of
    one draw share a network call. With several segments, only whole rows can be selected.
    """

    conditioning: Conditioning
    clean: Tensor  # (N, *L)
    times: Tensor  # (N, draws)
    seeds: Tensor  # (N, draws)
    owner: Tensor  # (f,) the segment of every latent frame
    segments: int
    weigh: Callable[[Tensor, Tensor], Tensor]
    unit: Unit

    def cost(self, rows: Tensor) -> int:
        """Count the network calls that these rows need."""
        return len(rows) * self.times.shape[1] * self.conditioning.passes

    def __getitem__(self, cut: tuple[Tensor, slice]) -> MatchingSteps:
        rows, columns = cut
        times, seeds = (drawn[rows][:, columns] for drawn in (self.times, self.seeds))
        conditioning, clean = self.conditioning[rows], self.clean[rows]
        return dataclasses.replace(self, conditioning=conditioning, clean=clean, times=times, seeds=seeds)

    def noise(self) -> Tensor:
        """Generate the noise of every draw from its seed: (N, draws, *L), the same at every call."""
        shape, generator = self.clean.shape[1:], torch.Generator()
        drawn = [
            torch.randn(shape, generator=generator.manual_seed(seed))
            for seed in self.seeds.flatten().tolist()
        ]
        return torch.stack(drawn).view(*self.seeds.shape, *shape).to(self.clean)

    def states(self) -> tuple[Tensor, Tensor]:
        """Mix finished latents and noise; returns (N, draws, *L) and the times (N, draws)."""
        clean = self.clean[:, None].expand(*self.times.shape, *self.clean.shape[1:])
        mixed = noised(clean.flatten(0, 1), self.noise().flatten(0, 1), self.times.flatten())
        return mixed.view_as(clean), self.times

    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput:
        """Return `logp`, the negative weighted error of velocities (N, draws, *L), and outputs `extra`."""
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
        """Average the squared error over all dimensions, or over those of each segment: (N, T)."""
        squared = (velocity - target).double().square()  # float32 would lose errors below 1e-38
        if self.segments == 1:
            return mean_dims(squared, 2)
        per_frame = squared.mean((2, 4, 5))  # (N, draws, f)
        inside = (self.owner[None] == torch.arange(self.segments)[:, None]).to(per_frame)  # (segments, f)
        per_segment = per_frame @ (inside / inside.sum(1, keepdim=True)).T  # (N, draws, segments)
        return per_segment.transpose(1, 2).flatten(1)
