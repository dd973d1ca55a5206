"""The denoising engine: samples images and videos along the schedule of a pipeline."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal

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
from mmrl.diffusion.sizes import FrameSize, check_engine_size, places_by, result_size
from mmrl.diffusion.staged_network import check_trained
from mmrl.diffusion.steps import Conditioning, FlowPolicy, FlowRow

# Options for stochastic steps, with their defaults; other values require a `solver`.
CHOICES = {"stochastic": None, "window_size": 0, "window_start": None, "window_shrinks": False, "share": 1}


@dataclass(frozen=True, eq=False)
class DenoisingPlan:
    """Size, schedule and all random choices for denoising one row.

    `size` is the size of the result, `times` (S + 1,) the schedule of S steps. `start` (*L, a latent's shape)
    is the initial noise, or the latents at step `first`. `window` is the range [from, to) of the T stochastic
    steps, `noise` (T, *L) is their noise, and `at` holds the indices of the recorded steps.
    """

    prompt: Prompt
    size: FrameSize
    times: Tensor
    start: Tensor
    window: tuple[int, int]
    noise: Tensor
    at: Tensor
    first: int = 0


@engine
@dataclass(eq=False)
class Denoise:
    """Sample images (videos, with `num_frames` above 1) along the pipeline's own schedule.

    Without a `solver` all steps are deterministic and no path is recorded. With a solver, steps in the range
    `stochastic` are sampled and recorded. Noise is keyed by prompt and generation, so it depends neither on
    the order of a batch nor on `batch_size`. A prompt can set its own size; images of one size run through
    the network together.

    Args:
        num_inference_steps: Denoising steps.
        guidance_scale: Scale of classifier-free guidance. At 1 or below (Z-Image: at 0) the network runs once
            per step, with the prompt alone, as in diffusers. Models with a scale input always run once.
        guidance_scale_2: Scale for the second network, for low noise; by default `guidance_scale`.
        height: Height of the image in pixels, unless the prompt sets its own.
        width: Width of the image in pixels, unless the prompt sets its own.
        num_frames: Frames of a video, unless the prompt sets its own; 1: images.
        frames_per_second: Frame rate of a video.
        solver: Stochastic solver, such as `diffusion.flow_sde`; without one, all steps are deterministic.
        stochastic: Range [from, to) of stochastic steps; by default all but the last, whose noise is too
            small to learn from.
        window_size: Number of steps in `stochastic` that are stochastic in a sampling round; 0: all.
        window_start: First step of the window. By default it is random in every round (Flow-GRPO-Fast); a
            schedule can move it (MixGRPO, arXiv 2507.21802). A window beyond `stochastic` is moved back.
        window_shrinks: Cut a window beyond `stochastic`, instead of moving it back.
        ode: Solver of the deterministic steps.
        share: Fraction of stochastic steps to record, random per row (DanceGRPO, arXiv 2505.07818).
        same_noise: Start all rows of a prompt from the same noise.
        batch_size: Maximum number of rows in the network at once; 0: all rows of one size.
    """

    notes = frozenset({"logp"})

    policy: FlowPolicy
    _: KW_ONLY
    stream: Stream
    num_inference_steps: PositiveInt = 10
    guidance_scale: NonNegativeFloat = 4.5
    guidance_scale_2: NonNegativeFloat | None = None
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
        if self.guidance_scale_2 is not None and len(self.policy.stages) == 1:
            raise ConfigError(
                "`guidance_scale_2` of `diffusion.denoise` is for a second network, and this model has one "
                "for all times; leave it out"
            )
        self.ode_step = ODE_STEPS[self.ode]
        self.size = (self.num_frames, self.height, self.width)
        check_engine_size(self.policy.family, self.policy.pipe, self.size, "diffusion.denoise")
        self.schedules: dict[FrameSize, tuple[tuple[int, ...], Tensor]] = {}
        self.shape, self.times = self.schedule(self.size)
        if self.solver and learns_from_steps and self.stream.purpose == "train":
            check_trained(self.policy.stages, self.policy.trained, self.times[low:high])

    @classmethod
    def size_from(cls, options: Mapping[str, Any]) -> FrameSize:
        """Return frames, height and width of results from the options of an engine."""
        given = {"num_frames": cls.num_frames, "height": cls.height, "width": cls.width} | dict(options)
        return given["num_frames"], given["height"], given["width"]

    def schedule(self, size: FrameSize) -> tuple[tuple[int, ...], Tensor]:
        """Return the latent shape *L and the times (S + 1,) for a result size; both are cached."""
        if size not in self.schedules:
            (frames, height, width), family, pipe = size, self.policy.family, self.policy.pipe
            shape = family.latent_shape(pipe, height, width, frames)
            times = check_times(family.sigmas(pipe, self.num_inference_steps, shape))
            self.schedules[size] = shape, times
        return self.schedules[size]

    def result_size(self, prompt: Prompt) -> FrameSize:
        """Return the result size for a prompt; raises `PromptError` if the model cannot generate it."""
        with reading(prompt):
            return result_size(self.policy.family, self.policy.pipe, prompt, self.size)

    def window(self) -> tuple[int, int]:
        """Choose the range [from, to) of the stochastic steps for this sampling round."""
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
        """Sample an image or video for every prompt, in order."""
        return self.follow(self.plans(prompts))

    def plans(self, prompts: Sequence[Prompt]) -> list[DenoisingPlan]:
        """Create a plan for every prompt, with all its noise, which is keyed by prompt and generation."""
        low, high = self.window()
        recorded = max(1, round(self.share * (high - low))) if high > low else 0
        generations: Counter[str] = Counter()
        plans, sizes = [], dict[str, FrameSize]()
        for prompt in prompts:
            if prompt.uid not in sizes:
                sizes[prompt.uid] = self.result_size(prompt)
            shape, times = self.schedule(size := sizes[prompt.uid])
            generator = self.stream.generator(prompt.uid, generations[prompt.uid])
            generations[prompt.uid] += 1
            # With `same_noise`, all generations of a prompt draw their start with the same key.
            first = self.stream.generator(prompt.uid, "start") if self.same_noise else generator
            start = torch.randn(shape, generator=first)
            # Draw noise for the whole window, so that `share` only changes which steps are recorded.
            noise = torch.randn((high - low, *shape), generator=generator)
            chosen = torch.randperm(high - low, generator=generator)[:recorded].sort().values
            plans.append(DenoisingPlan(prompt, size, times, start, (low, high), noise, low + chosen))
        return plans

    @torch.no_grad()
    def follow(self, plans: Sequence[DenoisingPlan]) -> Rollouts:
        """Denoise by plans, in batches of one latent size; returns one trajectory per plan, in order."""
        groups = places_by((plan.size, plan.first) for plan in plans)
        parts = [
            group[at : at + size]
            for group in groups
            for size in [self.batch_size or len(group)]
            for at in range(0, len(group), size)
        ]
        rows: dict[int, Trajectory] = {}
        for number, part in enumerate(parts, 1):
            work = f"denoising, batch {number} of {len(parts)}"
            rows |= zip(part, self._denoise([plans[i] for i in part], work), strict=True)
        return tuple(rows[i] for i in range(len(plans)))

    def _denoise(self, plans: Sequence[DenoisingPlan], work: str) -> list[Trajectory]:
        """Denoise a batch of plans that have the same size and first step."""
        policy, (low, high), first = self.policy, plans[0].window, plans[0].first
        conditions, negatives, passes = [], [], policy.passes(self.guidance_scale)
        for plan in plans:
            with reading(plan.prompt):
                request = Request.of(plan.prompt, plan.size)
                conditions.append(policy.condition(request))
                negatives += [policy.condition(request, negative=True)] if passes > 1 else []
        second = self.guidance_scale_2
        guidance = self.guidance_scale if second is None else (self.guidance_scale, second)
        conditioning = Conditioning.of(conditions, guidance, passes, negatives)
        times = plans[0].times.to(policy.device)
        latents = torch.stack([plan.start for plan in plans]).to(policy.device, policy.precision)  # (B, *L)
        noise = torch.stack([plan.noise for plan in plans])  # (B, T, *L)
        # The path has S + 1 entries; those before step `first` repeat the start.
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
            # Without stochastic steps, keep only the final latents.
            path = [*path, latents.cpu()] if high > low else [latents.cpu()]
        logps = torch.stack(logp, 1) if logp else torch.zeros(len(plans), 0)  # (B, T)
        frames = policy.family.frames_per_latent(policy.pipe, tuple(plans[0].start.shape))
        rows = []
        for i, (plan, pixels) in enumerate(zip(plans, policy.decode(latents), strict=True)):
            steps = FlowRow(
                conditions[i], torch.stack([state[i] for state in path]), plan.at, plan.times,
                conditioning.guidance, passes, self.solver, frames, negatives[i] if negatives else None,
            )  # fmt: skip
            length = policy.likelihood.length(steps)
            # Only the likelihood `diffusion.transition` defines log-densities of sampled steps.
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
    """Raise FloatingPointError if latents (B, *L) hold NaN or infinity; `names` are the rows' prompt ids."""
    broken = (~latents.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist()
    if broken:
        raise FloatingPointError(
            f"latents of prompt '{names[broken[0]]}' ({len(broken)} of {len(names)} rows) are NaN or "
            f"infinite after denoising step {step}; the network diverged or its precision overflows: look at "
            "the last updates (learning rate, gradient norm), or set `policy.dtype` to bfloat16 or float32"
        )


def outcome_of(pixels: Tensor, frames_per_second: float, end: int) -> Outcome:
    """Wrap an image (3, height, width) or video (F, 3, height, width) as the outcome after `end` steps."""
    if pixels.ndim == 3:
        return Outcome(image=pixels, end=end)
    return Outcome(video=pixels, times=torch.arange(len(pixels)) / frames_per_second, end=end)
