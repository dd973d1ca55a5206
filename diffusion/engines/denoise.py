"""The denoising engine: samples images and videos along the schedule of a pipeline."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import (
    Ascending,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
)
from mmrl.config.registry import engine
from mmrl.core.progress import advance
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory, reading
from mmrl.diffusion.flow_math import ODE_STEPS
from mmrl.diffusion.model_family import Request
from mmrl.diffusion.schedule import check_times
from mmrl.diffusion.steps import Conditioning, FlowPolicy, FlowRow

# Options that choose among stochastic steps, and their defaults, which leave the choice open.
CHOICES = {"stochastic": None, "window_size": 0, "window_start": None, "window_shrinks": False, "share": 1}


@dataclass(frozen=True, eq=False)
class DenoisingPlan:
    """All random choices of one row.

    `start` (*L) is the initial noise, `window` the stochastic steps [from, to), `noise` (T, *L) theirs, and
    `at` the indices of the recorded ones.
    """

    prompt: Prompt
    start: Tensor
    window: tuple[int, int]
    noise: Tensor
    at: Tensor


@engine
@dataclass(eq=False)
class Denoise:
    """Sample images (videos, with `num_frames` above 1) along the pipeline's own schedule.

    Without a `solver` all steps are deterministic and no path is recorded. With a solver, steps in the range
    `stochastic` are sampled and recorded. Noise is keyed by prompt and generation, so it depends neither on
    the order of a batch nor on `batch_size`.

    Args:
        num_inference_steps: Denoising steps.
        guidance_scale: Strength of guidance. At 1 and below the network runs once per step, with the prompt
            alone, as in diffusers (Z-Image: at 0); models that take guidance as an input run once at any.
        height: Of the image, pixels.
        width: Of the image, pixels.
        num_frames: Frames of a video; 1 makes images.
        frames_per_second: Of a video.
        solver: Stochastic solver, such as `diffusion.flow_sde`; none makes all steps deterministic.
        stochastic: Range [from, to) of stochastic steps; by default all but the last, whose noise is too
            small to learn from.
        window_size: Number of steps in `stochastic` that are stochastic per collection; 0 is all of them.
        window_start: First step of the window. By default drawn for every collection (Flow-GRPO-Fast); a
            schedule moves it (MixGRPO, arXiv 2507.21802). A window beyond `stochastic` is moved back.
        window_shrinks: Cut such a window instead of moving it.
        ode: Deterministic solver of the other steps.
        share: Recorded share of the stochastic steps, at random per row (DanceGRPO, arXiv 2505.07818).
        same_noise: Start all rows of a prompt from the same noise.
        batch_size: Most rows in the network at once; 0 is all.
    """

    notes = frozenset({"logp"})

    policy: FlowPolicy
    _: KW_ONLY
    stream: Stream
    num_inference_steps: PositiveInt = 10
    guidance_scale: NonNegativeFloat = 4.5
    height: PositiveInt = 512
    width: PositiveInt = 512
    num_frames: PositiveInt = 1
    frames_per_second: PositiveFloat = 16.0
    solver: Callable | None = None
    stochastic: Annotated[tuple[NonNegativeInt, PositiveInt], Ascending()] | None = None
    window_size: NonNegativeInt = 0
    window_start: NonNegativeInt | None = None
    window_shrinks: bool = False
    ode: Literal["euler", "heun"] = "euler"
    share: PositiveShare = 1.0
    same_noise: bool = False
    batch_size: NonNegativeInt = 0

    def __post_init__(self) -> None:
        learns_from_steps, num_steps = self.policy.likelihood.stochastic, self.num_inference_steps
        self.low, self.high = low, high = self.stochastic or (0, num_steps - 1)
        chosen = [name for name, default in CHOICES.items() if vars(self)[name] != default]
        if self.solver is None and learns_from_steps and self.stream.purpose == "train":
            raise ValueError(
                "the policy's likelihood reads stochastic steps, but the engine `diffusion.denoise` has no "
                "`solver`; add for instance `solver: diffusion.flow_sde`, or set the policy's likelihood to "
                "`diffusion.matching`"
            )
        if self.solver is None and chosen:
            raise ValueError(
                f"`{chosen[0]}` chooses among stochastic steps, but the engine `diffusion.denoise` has no "
                f"`solver`; add one, or leave `{chosen[0]}` out"
            )
        if self.solver and not low < high <= num_steps:
            raise ValueError(
                f"`stochastic` must be [from, to) within {num_steps} denoising steps, not {low, high}"
            )
        if self.solver and self.window_size > high - low:
            raise ValueError(
                f"`window_size` is {self.window_size}, but `stochastic` {low, high} has {high - low} steps"
            )
        if self.solver and high == num_steps and learns_from_steps:
            raise ValueError(
                f"`stochastic` {low, high} holds the last of {num_steps} steps, whose noise is (nearly) "
                f"zero, so that its log-density explodes; end at {num_steps - 1}"
            )
        if (negative := self.policy.negative_prompt) and self.policy.passes(self.guidance_scale) == 1:
            warnings.warn(
                f"`guidance_scale` {self.guidance_scale:g} of `diffusion.denoise` switches guidance off, so "
                f"the `negative_prompt` '{negative}' has no effect; set `guidance_scale` above 1, or leave "
                "it out",
                stacklevel=2,
            )
        self.ode_step = ODE_STEPS[self.ode]
        family, pipe = self.policy.family, self.policy.pipe
        try:
            self.shape = family.latent_shape(pipe, self.height, self.width, self.num_frames)
        except ValueError as error:
            raise ConfigError(f"`height`, `width` or `num_frames` of `diffusion.denoise`: {error}") from error
        self.times = check_times(family.sigmas(pipe, num_steps, self.shape))

    def window(self) -> tuple[int, int]:
        """Choose the stochastic steps of this collection: [from, to)."""
        if self.solver is None:
            return 0, 0
        if not self.window_size:
            return self.low, self.high
        latest = self.high - self.window_size
        if self.window_start is None:
            generator = self.stream.generator("denoise window")
            start = int(torch.randint(self.low, latest + 1, (), generator=generator))
        else:
            latest = self.high - 1 if self.window_shrinks else latest
            start = min(max(self.window_start, self.low), latest)
        return start, min(start + self.window_size, self.high)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample an image or video for every entry, in order."""
        return self.follow(self.plans(prompts))

    def plans(self, prompts: Sequence[Prompt]) -> list[DenoisingPlan]:
        """Draw all noise, keyed by prompt and generation."""
        low, high = self.window()
        recorded = max(1, round(self.share * (high - low))) if high > low else 0
        generations: Counter[str] = Counter()
        plans = []
        for prompt in prompts:
            generator = self.stream.generator(prompt.uid, generations[prompt.uid])
            generations[prompt.uid] += 1
            # A shared start has the same key for all generations.
            first = self.stream.generator(prompt.uid, "start") if self.same_noise else generator
            start = torch.randn(self.shape, generator=first)
            # Noise for all steps of the window, so that `share` changes the recorded steps but not the path.
            noise = torch.randn((high - low, *self.shape), generator=generator)
            chosen = torch.randperm(high - low, generator=generator)[:recorded].sort().values
            plans.append(DenoisingPlan(prompt, start, (low, high), noise, low + chosen))
        return plans

    @torch.no_grad()
    def follow(self, plans: Sequence[DenoisingPlan], first: int = 0) -> Rollouts:
        """Denoise the plans' latents, from step `first` of the schedule on."""
        size = self.batch_size or len(plans) or 1
        batches = [plans[at : at + size] for at in range(0, len(plans), size)]
        named = ((f"denoising, batch {i + 1} of {len(batches)}", batch) for i, batch in enumerate(batches))
        return tuple(row for work, batch in named for row in self._denoise(batch, first, work))

    def _denoise(self, plans: Sequence[DenoisingPlan], first: int, work: str) -> list[Trajectory]:
        policy, (low, high) = self.policy, plans[0].window
        conditions, negatives, passes = [], [], policy.passes(self.guidance_scale)
        for plan in plans:
            with reading(plan.prompt):
                request = Request.of(plan.prompt, (self.num_frames, self.height, self.width))
                conditions.append(policy.condition(request))
                negatives += [policy.condition(request, negative=True)] if passes > 1 else []
        conditioning = Conditioning.of(conditions, self.guidance_scale, passes, negatives)
        times = self.times.to(policy.device)
        latents = torch.stack([plan.start for plan in plans]).to(policy.device, policy.precision)  # (B, *L)
        noise = torch.stack([plan.noise for plan in plans])  # (B, T, *L)
        # The path is indexed as the schedule, so skipped steps are filled with the start.
        path, logp = [latents.cpu()] * (first + 1), []
        for i in range(first, len(times) - 1):
            if low <= i < high:
                time, following = (times[j].expand(len(plans)) for j in (i, i + 1))
                velocity = policy.velocity(latents, time, conditioning)
                step = self.solver(latents, velocity, time, following, times[1])
                latents = step.draw(noise[:, i - low].to(latents))
                logp.append(step.logp(latents).float().cpu())
            else:
                latents = self.advance(conditioning, latents, times[i], times[i + 1])
            check_finite(latents, [plan.prompt.uid for plan in plans], i)
            advance(work, i + 1 - first, len(times) - 1 - first)
            # Without stochastic steps only the end of the path is needed.
            path = [*path, latents.cpu()] if high > low else [latents.cpu()]
        logps = torch.stack(logp, 1) if logp else torch.zeros(len(plans), 0)  # (B, T)
        frames = policy.family.frames_per_latent(policy.pipe, self.shape)
        rows = []
        for i, (plan, pixels) in enumerate(zip(plans, policy.decode(latents), strict=True)):
            steps = FlowRow(
                conditions[i], torch.stack([state[i] for state in path]), plan.at, self.times,
                conditioning.guidance, passes, self.solver, frames, negatives[i] if negatives else None,
            )  # fmt: skip
            length = policy.likelihood.length(steps)
            # Only `diffusion.transition` has log-densities now; those of matching follow in `collate`.
            notes = {"logp": logps[i][plan.at - low]} if policy.likelihood.stochastic else {}
            outcome = outcome_of(pixels, self.frames_per_second, length)
            rows.append(Trajectory(plan.prompt, plan.prompt.uid, (outcome,), steps, length, notes))
        return rows

    def advance(self, conditioning: Conditioning, latents: Tensor, time: Tensor, following: Tensor) -> Tensor:
        """Take one deterministic step of latents (B, *L) between two scalar times."""
        flow = lambda latents, time: self.policy.velocity(latents, time, conditioning)
        start, end = (at.to(latents).expand(len(latents)) for at in (time, following))
        return self.ode_step(latents, flow(latents, start), start, end, flow)


def check_finite(latents: Tensor, names: list[str], step: int) -> None:
    """Raise if latents (B, *L) contain NaN or infinity; `names` are the prompts of the rows."""
    broken = (~latents.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
    if broken:
        raise FloatingPointError(
            f"latents of prompt '{names[broken[0]]}' ({len(broken)} of {len(names)} rows) are NaN or "
            f"infinite after denoising step {step}; the network diverged or its precision overflows: look at "
            "the last updates (learning rate, gradient norm), or set `policy.dtype` to bfloat16 or float32"
        )


def outcome_of(pixels: Tensor, frames_per_second: float, end: int) -> Outcome:
    """Wrap an image (3, height, width) or a video (F, 3, height, width) as an outcome."""
    if pixels.ndim == 3:
        return Outcome(image=pixels, end=end)
    return Outcome(video=pixels, times=torch.arange(len(pixels)) / frames_per_second, end=end)
