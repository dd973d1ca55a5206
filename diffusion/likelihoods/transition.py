"""The transition likelihood: the Gaussian log-density of each stochastic denoising step."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmrl.config.registry import likelihood
from mmrl.core.step_table import StepOutput
from mmrl.core.types import Unit
from mmrl.diffusion.steps import Conditioning, FlowRow


@likelihood
class Transition:
    """Log-density of the recorded stochastic steps of a rollout (Flow-GRPO, arXiv 2505.05470).

    `logp` is a mean over dimensions, which is why published clip ranges are as small as 1e-5.
    """

    outputs = frozenset({"mean", "std", "dt", "velocity", "time"})
    stochastic = True

    def length(self, row: FlowRow) -> int:
        """Count the recorded steps."""
        return len(row.at)

    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> TransitionSteps:
        """Batch paths; they must share schedule and number of recorded steps."""
        for row, uid in zip(rows, uids, strict=True):
            if row.solver is None or not len(row.at):
                raise ValueError(
                    f"a row of prompt '{uid}' holds no stochastic steps: a recorded image, or a rollout "
                    "without a solver; use `diffusion.matching`, or give the engine a solver such as "
                    "`diffusion.flow_sde`"
                )
        conditioning = Conditioning.of_rows(rows, "diffusion.transition")
        forms = {(len(row.at), *(round(time, 6) for time in row.times.tolist())) for row in rows}
        if len(forms) > 1:
            raise ValueError(
                "diffusion.transition wants rows of one schedule and number of recorded steps, but got "
                f"(recorded, times) {sorted(forms)}"
            )
        # (N, S + 1, *L) and (N, T)
        path, at = torch.stack([row.path for row in rows]), torch.stack([row.at for row in rows])
        return TransitionSteps(conditioning, path, at, rows[0].times, rows[0].solver)


@dataclass(frozen=True, eq=False)
class TransitionSteps:
    """Stochastic steps of `N` rows: paths (N, S + 1, *L), and the indices where `T` recorded steps start."""

    conditioning: Conditioning
    path: Tensor
    at: Tensor  # (N, T)
    times: Tensor  # (S + 1,)
    solver: Callable
    unit: Unit = Unit.STEP

    def cost(self, rows: Tensor) -> int:
        """Count network calls."""
        return len(rows) * self.at.shape[1] * self.conditioning.passes

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TransitionSteps:
        rows, columns = cut
        conditioning, at = self.conditioning[rows], self.at[rows][:, columns]
        return replace(self, conditioning=conditioning, path=self.path[rows], at=at)

    def states(self, shift: int = 0) -> tuple[Tensor, Tensor]:
        """Latents (N, T, *L) and times (N, T), `shift` indices after the start of each recorded step."""
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
