"""The prefix engine: decodes prefixes of a trajectory, completed without further noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts
from mmrl.diffusion.engines.denoise import Denoise, check_finite, outcome_of
from mmrl.diffusion.flow_math import clean_estimate
from mmrl.diffusion.steps import Conditioning, FlowRow


@engine
class WithPrefixRollouts:
    """Add an outcome per prefix of the stochastic steps, to credit single steps.

    By default prefixes of 0 .. T - 1 steps are completed by the deterministic solver with the row's own
    guidance and schedule (TP-GRPO, arXiv 2602.06422), followed by the row's own image: T + 1 outcomes with
    ends 0 .. T. The first starts from the row's own noise, as the definition asks (our reading: the published
    code draws another). With `one_step`, the clean estimate after every step is decoded instead (VGPO, arXiv
    2512.12387): T outcomes with ends 1 .. T, the last of them the row's own image. All unfinished prefixes of
    a batch go through the network together; `batch_size` is the most rows at once, 0 all.
    """

    notes = frozenset()

    def __init__(self, engine: Denoise, *, one_step: bool = False, batch_size: NonNegativeInt = 0) -> None:
        if engine.solver is None or engine.share < 1:
            raise ValueError(
                "`diffusion.with_prefix_rollouts` completes prefixes of stochastic steps, so the engine it "
                f"wraps needs a `solver` (it has {engine.solver}) and `share: 1` (it has {engine.share})"
            )
        if not engine.policy.likelihood.stochastic and engine.stream.purpose == "train":
            raise ValueError(
                "`diffusion.with_prefix_rollouts` credits stochastic steps, but the steps of the policy's "
                "likelihood are draws; set it to `diffusion.transition`"
            )
        self.engine, self.policy = engine, engine.policy
        self.one_step, self.batch_size = one_step, batch_size

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Run the wrapped engine, and add an outcome for every prefix."""
        rows = self.engine.rollout(prompts)
        if not rows or (self.one_step and len(rows[0].steps.at) == 1):
            return rows  # the only step ends in the row's own image
        flat = self.finished(rows).flatten(0, 1)  # (N K, *L)
        parts = flat.split(self.batch_size or len(flat))
        images = iter([image for part in parts for image in self.policy.decode(part)])
        ends, fps = range(int(self.one_step), len(rows[0].steps.at)), self.engine.frames_per_second
        return tuple(
            replace(row, outcomes=(*[outcome_of(next(images), fps, end) for end in ends], *row.outcomes))
            for row in rows
        )

    def finished(self, rows: Rollouts) -> Tensor:
        """Finish the prefixes of 0 .. T - 1 steps, or of 1 .. T - 1 with `one_step`: latents (N, K, *L)."""
        states: list[FlowRow] = [row.steps for row in rows]
        conditioning = Conditioning.of_rows(states, "diffusion.with_prefix_rollouts")
        times = states[0].times.to(self.policy.device)
        at = states[0].at[:-1] + 1 if self.one_step else states[0].at  # (K,) steps that prefixes go on from
        latents = torch.stack([state.path[at] for state in states])  # (N, K, *L)

        def compute(function: Callable[[Conditioning, Tensor, Tensor], Tensor], columns: Tensor) -> Tensor:
            """Map `function(conditioning, latents, times)` over (N, columns), `batch_size` rows at a time."""
            flat = latents[:, columns].flatten(0, 1)  # rows times columns, a row's columns together
            owner = torch.arange(len(rows)).repeat_interleave(len(columns))
            time = times[at[columns]].repeat(len(rows))
            parts = torch.arange(len(flat)).split(self.batch_size or len(flat))
            computed = [
                function(conditioning[owner[part]], flat[part].to(times.device), time[part]).cpu()
                for part in parts
            ]
            return torch.cat(computed).view(len(rows), len(columns), *latents.shape[2:])

        if self.one_step:
            velocity = self.policy.velocity
            return compute(
                lambda texts, x, time: clean_estimate(x, velocity(x, time, texts), time),
                torch.arange(len(at)),
            )
        for i in range(int(at[0]), len(times) - 1):
            started = (at <= i).nonzero()[:, 0]  # later prefixes have not left the trajectory yet
            step = lambda texts, x, _, i=i: self.engine.advance(texts, x, times[i], times[i + 1])
            latents[:, started] = moved = compute(step, started)
            check_finite(
                moved.flatten(0, 1), [row.prompt.uid for row in rows for _ in range(len(started))], i
            )
        return latents
