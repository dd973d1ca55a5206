"""Pictures of prefixes: what a trajectory would have become without the noise of its later steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import engine
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.diffusion.engines.denoise import Denoise, picture_outcome
from mmrl.diffusion.flow_math import clean_estimate
from mmrl.diffusion.ode import advance, check_finite, decode_all
from mmrl.diffusion.steps import Asked, FlowRow


@engine
class WithPrefixRollouts:
    """Give every row an outcome per prefix of its stochastic steps.

    By default prefixes of 0 .. T - 1 steps are completed by the deterministic solver with the row's own
    guidance and schedule (TP-GRPO, arXiv 2602.06422), and the row's own picture stands behind them: T + 1
    outcomes with ends 0 .. T. The first starts from the row's own noise, as the definition asks (our reading:
    the published code draws another). With `one_step`, the clean estimate behind every step is decoded
    instead (VGPO, arXiv 2512.12387): T outcomes with ends 1 .. T, the last of them the row's own picture.
    All unfinished prefixes of a batch go through the network together; `batch_size` bounds how many.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Denoise, *, one_step: bool = False, batch_size: NonNegativeInt = 0) -> None:
        if engine.solver is None or engine.share < 1:
            raise ValueError(
                "`diffusion.with_prefix_rollouts` completes prefixes of stochastic steps, so the engine it wraps "
                f"needs a `solver` (it has {engine.solver}) and `share: 1` (it has {engine.share})"
            )
        if not engine.policy.likelihood.stochastic and engine.stream.purpose == "train":
            raise ValueError(
                "`diffusion.with_prefix_rollouts` credits stochastic steps, but the steps of the policy's likelihood "
                "are draws; set it to `diffusion.transition`"
            )
        if batch_size < 0:
            raise ValueError(f"`batch_size` must be 0 or more, not {batch_size}")
        self.engine, self.policy = engine, engine.policy
        self.one_step, self.batch_size = one_step, batch_size

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine, and look at every prefix."""
        rows = self.engine.rollout(prompts)
        if not rows or (self.one_step and len(rows[0].steps.at) == 1):
            return rows  # behind the only step stands the row's own picture
        latents = self._jumps(rows) if self.one_step else self._completed(rows)
        pictures = decode_all(self.policy, latents.flatten(0, 1), self.batch_size)
        width = latents.shape[1]
        return tuple(self._with(row, pictures[i * width : (i + 1) * width]) for i, row in enumerate(rows))

    def _with(self, row: Trajectory, pictures: Sequence[Tensor]) -> Trajectory:
        first = 1 if self.one_step else 0
        probes: tuple[Outcome, ...] = tuple(
            picture_outcome(picture, self.engine.frames_per_second, first + k)
            for k, picture in enumerate(pictures)
        )
        return dataclasses.replace(row, outcomes=(*probes, *row.outcomes))

    def _jumps(self, rows: Rollouts) -> Tensor:
        """Estimate the data behind every step but the last: (N, T - 1, *L)."""
        states: list[FlowRow] = [row.steps for row in rows]
        at = states[0].at[:-1] + 1
        latents = torch.stack([state.path[at] for state in states])
        times = states[0].times[at].expand(len(rows), -1).flatten()
        flat = latents.flatten(0, 1)
        which = torch.arange(len(rows)).repeat_interleave(len(at))
        made = []
        for part in torch.arange(len(flat)).split(self.batch_size or len(flat)):
            here, time = flat[part].to(self.policy.device), times[part].to(self.policy.device)
            velocity = self.policy.velocity(here, time, _asked(states)[which[part]])
            made.append(clean_estimate(here, velocity, time).cpu())
        return torch.cat(made).view_as(latents)

    def _completed(self, rows: Rollouts) -> Tensor:
        """Finish the prefixes of 0 .. T - 1 steps deterministically: (N, T, *L)."""
        states: list[FlowRow] = [row.steps for row in rows]
        at, times = states[0].at, states[0].times.to(self.policy.device)
        latents = torch.stack([state.path[at] for state in states])  # (N, T, *L)
        asked = _asked(states)
        for i in range(int(at[0]), len(times) - 1):
            under_way = (at <= i).nonzero()[:, 0]  # later prefixes have not left the trajectory yet
            flat = latents[:, under_way].flatten(0, 1)
            which = torch.arange(len(rows)).repeat_interleave(len(under_way))
            moved = [
                advance(
                    self.policy,
                    asked[which[part]],
                    flat[part].to(self.policy.device),
                    times[i],
                    times[i + 1],
                    self.engine.move,
                ).cpu()
                for part in torch.arange(len(flat)).split(self.batch_size or len(flat))
            ]
            done = torch.cat(moved)
            check_finite(done, [rows[j].prompt.uid for j in which.tolist()], i)
            latents[:, under_way] = done.view(len(rows), len(under_way), *latents.shape[2:])
        return latents


def _asked(states: Sequence[FlowRow]) -> Asked:
    first = states[0]
    return Asked.of([state.condition for state in states], first.guidance, first.passes)
