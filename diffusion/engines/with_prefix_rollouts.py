"""The prefix engine: decodes what a trajectory would become without the noise of its later steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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

    notes: frozenset[str] = frozenset()

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
            return rows  # the only step leads to the row's own image
        latents = self._estimates(rows) if self.one_step else self._completed(rows)
        flat, width = latents.flatten(0, 1), latents.shape[1]
        images = [
            image for part in flat.split(self.batch_size or len(flat)) for image in self.policy.decode(part)
        ]
        probed = []
        for i, row in enumerate(rows):
            prefixes = [
                outcome_of(image, self.engine.frames_per_second, end)
                for end, image in enumerate(images[i * width : (i + 1) * width], int(self.one_step))
            ]
            probed.append(dataclasses.replace(row, outcomes=(*prefixes, *row.outcomes)))
        return tuple(probed)

    def _in_batches(self, flat: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Map `compute(latents, indices)` over flat latents (B, *L), `batch_size` rows at a time."""
        parts = torch.arange(len(flat)).split(self.batch_size or len(flat))
        return torch.cat([compute(flat[part].to(self.policy.device), part).cpu() for part in parts])

    def _estimates(self, rows: Rollouts) -> Tensor:
        """Estimate the data after every step but the last: (N, T - 1, *L)."""
        states: list[FlowRow] = [row.steps for row in rows]
        at = states[0].at[:-1] + 1
        latents = torch.stack([state.path[at] for state in states])
        times = states[0].times[at].expand(len(rows), -1).flatten()
        which = torch.arange(len(rows)).repeat_interleave(len(at))
        conditioning = Conditioning.of_rows(states, "diffusion.with_prefix_rollouts")

        def estimate(here: Tensor, part: Tensor) -> Tensor:
            time = times[part].to(here.device)
            return clean_estimate(here, self.policy.velocity(here, time, conditioning[which[part]]), time)

        return self._in_batches(latents.flatten(0, 1), estimate).view_as(latents)

    def _completed(self, rows: Rollouts) -> Tensor:
        """Complete the prefixes of 0 .. T - 1 steps deterministically: (N, T, *L)."""
        states: list[FlowRow] = [row.steps for row in rows]
        at, times = states[0].at, states[0].times.to(self.policy.device)
        latents = torch.stack([state.path[at] for state in states])  # (N, T, *L)
        conditioning = Conditioning.of_rows(states, "diffusion.with_prefix_rollouts")
        for i in range(int(at[0]), len(times) - 1):
            started = (at <= i).nonzero()[:, 0]  # later prefixes have not left the trajectory yet
            which = torch.arange(len(rows)).repeat_interleave(len(started))
            moved = self._in_batches(
                latents[:, started].flatten(0, 1),
                lambda here, part, i=i, which=which: self.engine.advance(
                    conditioning[which[part]], here, times[i], times[i + 1]
                ),
            )
            check_finite(moved, [rows[j].prompt.uid for j in which.tolist()], i)
            latents[:, started] = moved.view(len(rows), len(started), *latents.shape[2:])
        return latents
