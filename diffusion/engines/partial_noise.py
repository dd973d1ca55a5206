"""The partial-noise engine: image-to-image sampling from a recorded answer (DenseDPO)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from mmrl.config.ranges import PositiveShare
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts
from mmrl.diffusion.engines.denoise import Denoise
from mmrl.diffusion.flow_math import noised


@engine
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

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Denoise, *, eta: PositiveShare = 0.75) -> None:
        if engine.same_noise:
            raise ValueError(
                "rows of `diffusion.partial_noise` differ in their noise alone, so the engine it wraps must "
                "not have `same_noise`"
            )
        self.engine, self.policy, self.eta = engine, engine.policy, eta
        self._first_step()

    def _first_step(self) -> int:
        """Find the step to start with: the one whose time is nearest to `eta`."""
        first = int((self.engine.times[:-1] - self.eta).abs().argmin())
        low = self.engine.stochastic[0]
        if self.engine.solver is not None and low < first:
            raise ValueError(
                f"with `eta` {self.eta} denoising starts at step {first}, but the engine's stochastic steps "
                f"begin at {low}; set `stochastic: [{first}, ...]`"
            )
        return first

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Noise the recorded answer of every entry, and denoise it."""
        first = self._first_step()
        time = self.engine.times[first]
        recorded = {uid: self._recorded(p) for uid, p in {prompt.uid: prompt for prompt in prompts}.items()}
        plans = []
        for plan in self.engine.plans(prompts):
            clean = recorded[plan.prompt.uid]
            plans.append(dataclasses.replace(plan, start=noised(clean, plan.start.to(clean), time)))
        return self.engine.follow(plans, first)

    def _recorded(self, prompt: Prompt) -> Tensor:
        """Encode the first recorded answer of a prompt: (*L)."""
        if not prompt.answers:
            raise ValueError(
                f"prompt '{prompt.uid}' has no recorded image or video; the engine `diffusion.partial_noise` "
                "starts from it"
            )
        latents: Tensor = self.policy.encode(prompt, prompt.answers[0]).steps.path[-1]
        if latents.shape != self.engine.shape:
            raise ValueError(
                f"the recorded answer of prompt '{prompt.uid}' has latents of {tuple(latents.shape)}, but "
                f"the engine makes {tuple(self.engine.shape)}; set its `height`, `width` and `num_frames` to "
                "those of the answer, or resize the answer where the data are read"
            )
        return latents
