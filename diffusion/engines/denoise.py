"""From noise to pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import (
    Ascending,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
)
from mmrl.config.registry import engine
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.diffusion.model_family import frames_per_latent
from mmrl.diffusion.ode import MOVES, advance, check_finite, decode_all
from mmrl.diffusion.schedule import check_times
from mmrl.diffusion.steps import Asked, FlowRow, Painter


@dataclass(frozen=True, eq=False)
class Plan:
    """What one row is to do: where it starts (*L), which steps are stochastic ([from, to)), the noise of
    those (T, *L), and which of them are recorded."""

    prompt: Prompt
    start: Tensor
    window: tuple[int, int]
    noise: Tensor
    at: Tensor


@engine
class Denoise:
    """Make pictures (videos, with `num_frames` above 1) along the pipeline's own schedule.

    Without a `solver` all steps follow the flow (`ode`: euler or heun) and no path is kept. With one, the
    steps of `stochastic` (from, to; by default all but the last, whose noise is too small to learn from) are
    drawn from it and recorded. `window_size` above 0 makes only that many of them stochastic, from
    `window_start`, or from a place drawn for every collection (Flow-GRPO-Fast); `window_start` may follow a
    schedule (MixGRPO, arXiv 2507.21802). A window that reaches past `stochastic` is moved back, or with
    `window_shrinks` cut. `share` records that share of the stochastic steps, drawn row by row
    (DanceGRPO, arXiv 2505.07818). With `same_noise` all rows of a prompt start from the same noise.
    `guidance_scale` 1 asks the network once per step. Noise is keyed by prompt and generation, so it depends
    on neither the order of a batch nor on `batch_size`, which bounds the rows in the network at once.
    """

    notes: frozenset[str] = frozenset({"logp"})

    def __init__(
        self,
        policy: Painter,
        *,
        stream: Stream,
        num_inference_steps: PositiveInt = 10,
        guidance_scale: NonNegativeFloat = 4.5,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        num_frames: PositiveInt = 1,
        frames_per_second: PositiveFloat = 16.0,
        solver: Callable | None = None,
        stochastic: Annotated[tuple[NonNegativeInt, PositiveInt], Ascending()] | None = None,
        window_size: NonNegativeInt = 0,
        window_start: NonNegativeInt | None = None,
        window_shrinks: bool = False,
        ode: Literal["euler", "heun"] = "euler",
        share: PositiveShare = 1.0,
        same_noise: bool = False,
        batch_size: NonNegativeInt = 0,
    ) -> None:
        self.policy, self.stream, self.solver = policy, stream, solver
        self.guidance_scale, self.share, self.same_noise = guidance_scale, share, same_noise
        self.frames_per_second, self.batch_size, self.move = frames_per_second, batch_size, MOVES[ode]
        self.window_size, self.window_start, self.window_shrinks = window_size, window_start, window_shrinks
        if num_inference_steps < 1 or batch_size < 0 or not 0 < share <= 1:
            raise ValueError(
                "`num_inference_steps` must be at least 1, `batch_size` 0 or more and `share` in (0, 1], not "
                f"{num_inference_steps}, {batch_size} and {share}"
            )
        self.stochastic = stochastic or (0, num_inference_steps - 1)
        self._check_solver(
            {
                "stochastic": stochastic is not None,
                "window_size": window_size != 0,
                "window_start": window_start is not None,
                "window_shrinks": window_shrinks,
                "share": share != 1,
            }
        )
        self._check_window(num_inference_steps)
        self.shape = policy.family.latent_shape(policy.pipe, height, width, num_frames)
        self.times = check_times(policy.family.sigmas(policy.pipe, num_inference_steps, self.shape))

    def _check_solver(self, chosen: Mapping[str, bool]) -> None:
        if self.solver is not None:
            return
        if self.policy.likelihood.stochastic and self.stream.purpose == "train":
            raise ValueError(
                "the policy's likelihood reads stochastic steps, but the engine `diffusion.denoise` has no "
                "`solver`; add for instance `solver: diffusion.flow_sde`, or set the policy's likelihood to "
                "`diffusion.matching`"
            )
        for name, given in chosen.items():
            if given:
                raise ValueError(
                    f"`{name}` chooses among stochastic steps, but the engine `diffusion.denoise` has no "
                    f"`solver`; add one, or leave `{name}` out"
                )

    def _check_window(self, num_steps: int) -> None:
        low, high = self.stochastic
        if self.solver is None:
            return
        if not 0 <= low < high <= num_steps:
            raise ValueError(
                f"`stochastic` must be [from, to) within {num_steps} denoising steps, not {low, high}"
            )
        if not 0 <= self.window_size <= high - low:
            raise ValueError(
                f"`window_size` is {self.window_size}, but `stochastic` {low, high} has {high - low} steps"
            )
        if high == num_steps and self.policy.likelihood.stochastic:
            raise ValueError(
                f"`stochastic` {low, high} holds the last of {num_steps} steps, whose noise is (nearly) "
                f"zero, so that its log-density explodes; end at {num_steps - 1}"
            )

    def window(self) -> tuple[int, int]:
        """Say which steps of this collection are stochastic: [from, to)."""
        low, high = self.stochastic
        if self.solver is None:
            return 0, 0
        if not self.window_size:
            return low, high
        latest = high - self.window_size
        if self.window_start is None:
            start = int(torch.randint(low, latest + 1, (), generator=self.stream.generator("denoise window")))
        else:
            start = min(max(int(self.window_start), low), high - 1 if self.window_shrinks else latest)
        return start, min(start + self.window_size, high)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Make a picture for every entry, in order."""
        return self.follow(self.plans(prompts))

    def plans(self, prompts: Sequence[Prompt]) -> list[Plan]:
        """Draw everything that chance decides."""
        low, high = self.window()
        asked: dict[str, int] = {}
        plans = []
        for prompt in prompts:
            asked[prompt.uid] = asked.get(prompt.uid, -1) + 1
            plans.append(self._plan(prompt, asked[prompt.uid], low, high))
        return plans

    @torch.no_grad()
    def follow(self, plans: Sequence[Plan], first: int = 0) -> Rollouts:
        """Carry plans out, from step `first` of the schedule on."""
        size = self.batch_size or len(plans) or 1
        made: list[Trajectory] = []
        for at in range(0, len(plans), size):
            made += self._denoise(plans[at : at + size], first)
        return tuple(made)

    def _plan(self, prompt: Prompt, index: int, low: int, high: int) -> Plan:
        generator = self.stream.generator(prompt.uid, index)
        first = self.stream.generator(prompt.uid, "start") if self.same_noise else generator
        start = torch.randn(self.shape, generator=first)
        noise = torch.randn((high - low, *self.shape), generator=generator)
        recorded = max(1, round(self.share * (high - low))) if high > low else 0
        chosen = torch.randperm(high - low, generator=generator)[:recorded].sort().values
        return Plan(prompt, start, (low, high), noise, low + chosen)

    def _denoise(self, plans: Sequence[Plan], first: int) -> list[Trajectory]:
        policy, (low, high) = self.policy, plans[0].window
        conditions = [policy.condition(plan.prompt.text) for plan in plans]
        asked = Asked.of(conditions, self.guidance_scale, policy.passes(self.guidance_scale))
        times = self.times.to(policy.device)
        latents = torch.stack([plan.start for plan in plans]).to(policy.device, policy.precision)
        noise = torch.stack([plan.noise for plan in plans])
        names = [plan.prompt.uid for plan in plans]
        # Places of a path are those of the schedule, so what was skipped is filled up.
        path, logp = [latents.cpu()] * (first + 1), []
        for i in range(first, len(times) - 1):
            if low <= i < high:
                here, there = (times[j].expand(len(plans)) for j in (i, i + 1))
                step = self.solver(latents, policy.velocity(latents, here, asked), here, there, times[1])
                latents = step.draw(noise[:, i - low].to(latents))
                logp.append(step.logp(latents).float().cpu())
            else:
                latents = advance(policy, asked, latents, times[i], times[i + 1], self.move)
            check_finite(latents, names, i)
            path = [*path, latents.cpu()] if high > low else [latents.cpu()]
        pictures = decode_all(policy, latents, 0)
        said = torch.stack(logp, 1) if logp else torch.zeros(len(plans), 0)
        return [
            self._row(
                plan, picture, asked, conditions[i], torch.stack([state[i] for state in path]), said[i], low
            )
            for i, (plan, picture) in enumerate(zip(plans, pictures, strict=True))
        ]

    def _row(
        self, plan: Plan, picture: Tensor, asked: Asked, condition, path: Tensor, logp: Tensor, low: int
    ) -> Trajectory:
        policy = self.policy
        frames = frames_per_latent(policy.family, policy.pipe, self.shape)
        steps = FlowRow(
            condition, path, plan.at, self.times, asked.guidance, asked.passes, self.solver, frames
        )
        length = self.policy.likelihood.length(steps)
        outcome = picture_outcome(picture, self.frames_per_second, length)
        # Log-densities belong to the steps of `diffusion.transition`; draws of matching have none yet.
        notes = {"logp": logp[plan.at - low]} if self.policy.likelihood.stochastic else {}
        return Trajectory(plan.prompt, plan.prompt.uid, (outcome,), steps, length, notes)


def picture_outcome(picture: Tensor, frames_per_second: float, end: int) -> Outcome:
    """Wrap a picture (3, height, width) or a video (F, 3, height, width)."""
    if picture.ndim == 3:
        return Outcome(image=picture, end=end)
    times = torch.arange(len(picture)) / frames_per_second
    return Outcome(video=picture, times=times, end=end)
