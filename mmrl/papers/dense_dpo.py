"""DenseDPO (arXiv 2506.03517): pairs of videos from one partly noised video, compared per segment.

Title: DenseDPO: Fine-Grained Temporal Preference Optimization for Video Diffusion Models
Formula: x_n = (1 - eta) x_0 + eta noise at the step n = round(eta S) of S; a pair for every segment.
Our reading: the step is the one whose time is nearest to `eta`; the first recorded answer is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from mmrl.config.ranges import PositiveInt, PositiveShare
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.diffusion.engines.denoise import Denoise, DenoisingPlan
from mmrl.diffusion.flow_math import noised
from mmrl.diffusion.steps import segments_of


@engine(scope="diffusion")
class PartialNoise:
    """Denoise from a partly noised recorded image or video (DenseDPO, arXiv 2506.03517).

    A row starts from its prompt's recorded answer, noised to the share `eta`. Rows of one prompt differ only
    in their noise: they share motion and layout, and differ in detail, the more the larger `eta` is; 1 is
    denoising from pure noise. The paper starts from (1 - eta) x_0 + eta noise at step n = round(eta S) of S,
    counted from the data. Our reading, since schedules are rarely even: from the step whose time is nearest
    to `eta`, with that time as the share of noise, so that the network's time is the true one; on an even
    schedule the step is the paper's. Also ours: the default of `eta`, and that the first recorded answer is
    taken. If the wrapped engine has a `solver`, its stochastic steps must not begin earlier.
    """

    notes = frozenset()
    reads_answers = True

    def __init__(self, engine: Denoise, *, eta: PositiveShare = 0.75) -> None:
        self.engine, self.policy, self.eta = engine, engine.policy, eta
        if engine.same_noise:
            raise ValueError(
                "rows of `diffusion.partial_noise` differ in their noise alone, so the engine it wraps must "
                "not have `same_noise`"
            )
        self.first_step(engine.times)  # raises now if the stochastic steps begin too early

    def first_step(self, times: Tensor) -> int:
        """Find the step whose time is nearest to `eta`; a schedule may move it."""
        first = int((times[:-1] - self.eta).abs().argmin())
        if self.engine.solver is not None and self.engine.low < first:
            raise ValueError(
                f"with `eta` {self.eta} denoising starts at step {first}, but the engine's stochastic steps "
                f"begin at {self.engine.low}; set `stochastic: [{first}, ...]`"
            )
        return first

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Noise the first recorded answer of every entry, and denoise it."""
        recorded = {}
        for prompt in {prompt.uid: prompt for prompt in prompts}.values():
            if not prompt.answers:
                raise ValueError(
                    f"prompt '{prompt.uid}' has no recorded image or video; the engine "
                    "`diffusion.partial_noise` starts from it"
                )
            recorded[prompt.uid] = self.policy.encode(prompt, prompt.answers[0]).steps.path[-1]
        return self.engine.follow(
            [self.partly_noised(plan, recorded[plan.prompt.uid]) for plan in self.engine.plans(prompts)]
        )

    def partly_noised(self, plan: DenoisingPlan, clean: Tensor) -> DenoisingPlan:
        """Start a plan from noised latents `clean` (*L)."""
        if clean.shape != plan.start.shape:
            raise ValueError(
                f"the recorded answer of prompt '{plan.prompt.uid}' has latents of {tuple(clean.shape)}, "
                f"but the engine makes {tuple(plan.start.shape)}; set its `height`, `width` and `num_frames` "
                "to those of the answer, or resize the answer where the data are read"
            )
        first = self.first_step(plan.times)
        # The time of the schedule, not `eta` itself, so that the network's time is the true one.
        return replace(plan, start=noised(clean, plan.start.to(clean), plan.times[first]), first=first)


@engine(scope="diffusion")
class SegmentPreferences:
    """Cut every video into `segments` outcomes, each rewarded on its own (DenseDPO, arXiv 2506.03517).

    Each outcome ends its segment's steps, so `diffusion.matching` with as many `segments` learns from them
    one by one. A frame belongs to the segment of its centre. A recorded reward `name@2` is the reward
    `name` of segment 2, counted from 0; one without `@` is that of every segment.
    """

    notes = frozenset()

    def __init__(self, engine: Engine, *, segments: PositiveInt) -> None:
        self.engine, self.policy, self.segments = engine, engine.policy, segments

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Run the wrapped engine, and cut its videos."""
        return tuple(self.cut(row) for row in self.engine.rollout(prompts))

    def cut(self, row: Trajectory) -> Trajectory:
        """Cut the video of a row into one outcome per segment."""
        whole, num = row.outcomes[-1], self.segments
        frames = 0 if whole.video is None else len(whole.video)
        if frames < num or row.length % num:
            raise ValueError(
                f"a row of prompt '{row.prompt.uid}' with {frames} frames and {row.length} steps cannot be "
                f"cut into {num} segments; give the policy `likelihood: {{name: diffusion.matching, "
                f"segments: {num}}}`, and videos of that many frames or more"
            )
        owner = segments_of([1] * frames, num)  # (F,)
        parts = []
        for number in range(num):
            inside, recorded = owner == number, {}  # (F,)
            for name, value in whole.recorded.items():
                reward, _, segment = name.partition("@")
                if segment in ("", str(number)):
                    recorded[reward] = value
            times = None if whole.times is None else whole.times[inside]
            end = row.length // num * (number + 1)  # steps of a segment are side by side
            parts.append(replace(whole, video=whole.video[inside], times=times, end=end, recorded=recorded))
        return replace(row, outcomes=tuple(parts))
