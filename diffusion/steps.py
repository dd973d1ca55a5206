"""How rows of pictures are held: what was asked, the path that was taken, and what a likelihood makes of
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.core.step_table import StepOutput
from mmrl.core.types import Unit
from mmrl.diffusion.model_family import Condition, Family


@dataclass(frozen=True, eq=False)
class Asked:
    """What the network is told, for `B` rows: distinct conditions, and which of them is whose.

    `passes` counts the network calls of one velocity: two where it is guided by an empty text.
    """

    conditions: tuple[Condition, ...]
    which: Tensor  # (B,)
    guidance: float = 1.0
    passes: int = 1

    def __getitem__(self, rows: Tensor) -> Asked:
        distinct, which = torch.unique(self.which[rows], return_inverse=True)
        conditions = tuple(self.conditions[i] for i in distinct.tolist())
        return Asked(conditions, which, self.guidance, self.passes)

    @staticmethod
    def of(conditions: Sequence[Condition], guidance: float, passes: int) -> Asked:
        """Find out which conditions are the same object: rows of one prompt share theirs."""
        distinct = list({id(condition): condition for condition in conditions}.values())
        place = {id(condition): i for i, condition in enumerate(distinct)}
        which = torch.tensor([place[id(condition)] for condition in conditions])
        return Asked(tuple(distinct), which, guidance, passes)


@dataclass(frozen=True, eq=False)
class FlowRow:
    """How a row was made.

    `path` (P, *L) holds latents from noise to data, the finished one last, in the places of the schedule; a
    row that keeps no path holds the finished one only. `at` (T,) says from which places recorded steps start.
    `times` (S + 1,) is the schedule, empty for recorded pictures. `solver` made the stochastic steps.
    `frames` counts the pixel frames that every latent frame of a video stands for, in order.
    """

    condition: Condition
    path: Tensor
    at: Tensor
    times: Tensor
    guidance: float = 1.0
    passes: int = 1
    solver: Callable | None = None
    frames: tuple[int, ...] = ()


class FlowSteps(Protocol):
    """Steps as a likelihood sees them: what to ask the network, and how to read its answer."""

    asked: Asked
    unit: Unit

    def states(self) -> tuple[Tensor, Tensor]:
        """Give the latents (N, T, *L) and the times (N, T) to ask about."""

    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput:
        """Turn velocities (N, T, *L) into log-probabilities and what of `extra` is wanted."""

    def cost(self, rows: Tensor) -> int:
        """Count network calls."""

    def __getitem__(self, cut: tuple[Tensor, slice]) -> FlowSteps:
        """Cut out rows and a range of steps."""


class Likelihood(Protocol):
    """What a step is, and how likely."""

    says: frozenset[str]  # what it can put into `extra`
    stochastic: bool  # it reads stochastic steps, so rollouts must have some

    def length(self, row: FlowRow) -> int:
        """Count the steps of a row."""

    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> FlowSteps:
        """Line rows up; `uids` name their prompts."""


class Painter(Protocol):
    """What an engine needs of a policy of latents."""

    pipe: Any
    family: Family
    likelihood: Likelihood
    device: torch.device
    precision: torch.dtype

    def condition(self, text: str) -> Condition:
        """Read a text, once."""

    def passes(self, guidance: float) -> int:
        """Count the network calls of one guided velocity."""

    def velocity(self, latents: Tensor, sigma: Tensor, asked: Asked) -> Tensor:
        """Give velocities (B, *L) of latents at times (B,)."""

    def decode(self, latents: Tensor) -> Tensor:
        """Make pictures or videos, uint8, on the CPU."""


def common(rows: Sequence[FlowRow], what: str) -> None:
    """Refuse rows of one batch that were made under different settings."""
    settings = {(row.guidance, row.passes, tuple(row.path.shape[1:])) for row in rows}
    if len(settings) > 1:
        raise ValueError(
            f"{what} wants rows of one guidance scale and size, but got rows of (guidance, network calls, "
            f"latent) {sorted(settings)}; recorded pictures count as guidance 1"
        )
