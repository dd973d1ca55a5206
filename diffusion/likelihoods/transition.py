"""A step is a stochastic denoising step: the Gaussian log-density of the next latent."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.config.registry import likelihood
from mmrl.core.step_table import StepOutput
from mmrl.core.types import Unit
from mmrl.diffusion.steps import Asked, FlowRow, common


@likelihood
class Transition:
    """Read the recorded stochastic steps of a rollout (Flow-GRPO, arXiv 2505.05470).

    `logp` is a mean over dimensions, which is why published clip ranges are as small as 1e-5.
    """

    says = frozenset({"mean", "std", "dt", "velocity", "time"})
    stochastic = True

    def length(self, row: FlowRow) -> int:
        """Count the recorded steps."""
        return len(row.at)

    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> TransitionSteps:
        """Line paths up."""
        for row, uid in zip(rows, uids, strict=True):
            if row.solver is None or not len(row.at):
                raise ValueError(
                    f"a row of prompt '{uid}' holds no stochastic steps: a recorded picture, or a rollout "
                    "without a solver. `diffusion.transition` learns from stochastic steps only; use "
                    "`diffusion.matching`, or give the engine a solver such as `diffusion.flow_sde`"
                )
        common(rows, "diffusion.transition")
        forms = {(len(row.at), *(round(time, 6) for time in row.times.tolist())) for row in rows}
        if len(forms) > 1:
            raise ValueError(
                "diffusion.transition wants rows of one schedule and number of recorded steps, but got "
                f"(recorded, times) {sorted(forms)}"
            )
        first = rows[0]
        return TransitionSteps(
            Asked.of([row.condition for row in rows], first.guidance, first.passes),
            torch.stack([row.path for row in rows]),
            torch.stack([row.at for row in rows]),
            first.times,
            first.solver,
        )


@dataclass(frozen=True, eq=False)
class TransitionSteps:
    """Stochastic steps of `N` rows: paths (N, S + 1, *L), and where the `T` recorded steps start."""

    asked: Asked
    path: Tensor
    at: Tensor  # (N, T)
    times: Tensor  # (S + 1,)
    solver: Callable
    unit: Unit = Unit.STEP

    def cost(self, rows: Tensor) -> int:
        """Count network calls."""
        return len(rows) * self.at.shape[1] * self.asked.passes

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TransitionSteps:
        rows, columns = cut
        return TransitionSteps(
            self.asked[rows], self.path[rows], self.at[rows][:, columns], self.times, self.solver
        )

    def _along(self, shift: int) -> Tensor:
        rows = torch.arange(len(self.at))[:, None]
        return self.path[rows, self.at + shift]

    def states(self) -> tuple[Tensor, Tensor]:
        """Give the latents that steps start from, and their times."""
        return self._along(0), self.times[self.at]

    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput:
        """Give the log-density of the steps that were taken, under these velocities."""
        shape, device = self.at.shape, velocity.device
        here, there = (self._along(shift).to(velocity) for shift in (0, 1))
        time, following = (self.times[self.at + shift].to(device).flatten() for shift in (0, 1))
        step = self.solver(
            here.flatten(0, 1), velocity.flatten(0, 1), time, following, self.times[1].to(device)
        )
        said = {
            "mean": lambda: step.mean.unflatten(0, shape),
            "std": lambda: step.std.view(shape),
            "dt": lambda: (following - time).view(shape),
            "velocity": lambda: velocity,
            "time": lambda: time.view(shape),
        }
        logp = step.logp(there.flatten(0, 1)).view(shape)
        return StepOutput(logp, {name: said[name]() for name in sorted(extra)})
