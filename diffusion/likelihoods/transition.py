"""The transition likelihood: the Gaussian log-density of each stochastic denoising step."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmrl.config.registry import likelihood
from mmrl.core.step_table import StepOutput
from mmrl.core.types import Steps, Unit
from mmrl.diffusion.steps import Conditioning, FlowRow, collate_sizes


@likelihood
class Transition:
    """Log-density of the recorded stochastic steps of a rollout (Flow-GRPO, arXiv 2505.05470).

    `logp` is a mean over dimensions, which is why published clip ranges are as small as 1e-5.
    """

    outputs = frozenset({"mean", "std", "dt", "velocity", "time"})
    stochastic = True

    def length(self, row: FlowRow) -> int:
        """Count the training steps of a row, which are its recorded steps."""
        return len(row.at)

    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> Steps:
        """Batch rows; raises if schedules differ within a size, or numbers of recorded steps between rows."""
        for row, uid in zip(rows, uids, strict=True):
            if row.solver is None or not len(row.at):
                raise ValueError(
                    f"a row of prompt '{uid}' holds no stochastic steps: a recorded image, or a rollout "
                    "without a solver; use `diffusion.matching`, or give the engine a solver such as "
                    "`diffusion.flow_sde`"
                )
        sizes = {tuple(row.path.shape[1:]) for row in rows}
        # pairs (size, times), because times may depend on the size
        schedules = {(row.path.shape[1:], *(round(time, 6) for time in row.times.tolist())) for row in rows}
        counts = {len(row.at) for row in rows}
        if len(schedules) > len(sizes) or len(counts) > 1:
            raise ValueError(
                "diffusion.transition wants rows of one schedule and number of recorded steps, but got "
                f"{sorted(counts)} recorded steps and (latent, times) {sorted(schedules)}"
            )
        conditioning = Conditioning.of_rows(rows, "diffusion.transition")

        def make(places: list[int]) -> TransitionSteps:
            same = [rows[i] for i in places]
            # paths (N, S + 1, *L), step indices (N, T)
            path, at = torch.stack([row.path for row in same]), torch.stack([row.at for row in same])
            chosen = conditioning[torch.tensor(places)]
            return TransitionSteps(chosen, path, at, same[0].times, same[0].solver)

        return collate_sizes(rows, make)


@dataclass(frozen=True, eq=False)
class TransitionSteps:
    """Stochastic steps of N rows: paths (N, S + 1, *L), and the indices at which T recorded steps start."""

    conditioning: Conditioning
    path: Tensor
    at: Tensor  # (N, T)
    times: Tensor  # (S + 1,)
    solver: Callable
    unit: Unit = Unit.STEP

    def cost(self, rows: Tensor) -> int:
        """Count the network calls that these rows need."""
        return len(rows) * self.at.shape[1] * self.conditioning.passes

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TransitionSteps:
        rows, columns = cut
        conditioning, at = self.conditioning[rows], self.at[rows][:, columns]
        return replace(self, conditioning=conditioning, path=self.path[rows], at=at)

    def states(self, shift: int = 0) -> tuple[Tensor, Tensor]:
        """Return latents (N, T, *L) and times (N, T) before each recorded step; after it if `shift` is 1."""
        rows = torch.arange(len(self.at))[:, None]
        return self.path[rows, self.at + shift], self.times[self.at + shift]

    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput:
        """Compute the log-density of the recorded steps under velocities (N, T, *L)."""
        shape, device = self.at.shape, velocity.device
        # Solvers take one axis of rows: (N T, *L) latents and (N T,) times.
        (latents, time), (reached, following) = (
            (states.to(velocity).flatten(0, 1), times.to(device).flatten())
            for states, times in (self.states(), self.states(1))
        )
        step = self.solver(latents, velocity.flatten(0, 1), time, following, self.times[1].to(device))
        values = {
            "mean": step.mean.unflatten(0, shape),
            "std": step.std.view(shape),
            "dt": (following - time).view(shape),
            "velocity": velocity,
            "time": time.view(shape),
        }
        return StepOutput(step.logp(reached).view(shape), {name: values[name] for name in sorted(extra)})
