"""Data types of flow rollouts: text conditions, recorded paths and training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.core.step_table import StepOutput
from mmrl.core.types import Outcome, Prompt, Steps, Trajectory
from mmrl.diffusion.frozen_parts import FrozenParts
from mmrl.diffusion.model_family import Condition, PipelineFamily, Request


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Conditions and guidance of `B` rows: distinct conditions, and the index of each row's condition.

    `passes` is the number of network calls for one velocity: 2 with classifier-free guidance, else 1.
    `negatives` holds the condition of the negative prompt for each of `conditions`; empty with one pass.
    """

    conditions: tuple[Condition, ...]
    which: Tensor  # (B,)
    guidance: float = 1.0
    passes: int = 1
    negatives: tuple[Condition, ...] = ()

    def __getitem__(self, rows: Tensor) -> Conditioning:
        # Unused conditions are dropped, so that they are not moved to the device.
        distinct, which = torch.unique(self.which[rows], return_inverse=True)
        conditions, negatives = (
            tuple(several[i] for i in distinct.tolist()) if several else ()
            for several in (self.conditions, self.negatives)
        )
        return Conditioning(conditions, which, self.guidance, self.passes, negatives)

    @staticmethod
    def of(
        conditions: Sequence[Condition], guidance: float, passes: int, negatives: Sequence[Condition] = ()
    ) -> Conditioning:
        """Deduplicate conditions by identity: rows of one prompt share one object."""
        first = {id(condition): i for i, condition in reversed([*enumerate(conditions)])}
        chosen = sorted(first.values())
        which = torch.tensor([chosen.index(first[id(condition)]) for condition in conditions])
        distinct, without = (
            tuple(several[i] for i in chosen) if several else () for several in (conditions, negatives)
        )
        return Conditioning(distinct, which, guidance, passes, without)

    @staticmethod
    def of_rows(rows: Sequence[FlowRow], piece: str) -> Conditioning:
        """Batch the conditions of rows; raise if `piece` got rows of different settings."""
        settings = {(row.guidance, row.passes, tuple(row.path.shape[1:])) for row in rows}
        if len(settings) > 1:
            raise ValueError(
                f"{piece} wants rows of one guidance scale and size, but got rows of (guidance, network "
                f"calls, latent) {sorted(settings)}; recorded images count as guidance 1"
            )
        negatives = [row.negative for row in rows if row.negative is not None]
        return Conditioning.of([row.condition for row in rows], rows[0].guidance, rows[0].passes, negatives)


@dataclass(frozen=True, eq=False)
class FlowRow:
    """Latents, schedule and settings of one generated or recorded image or video.

    `path` (P, *L) are latents from noise to data, indexed as the schedule; a row without a recorded path has
    only the finished latent. `at` (T,) are the indices from which recorded steps start. `times` (S + 1,) is
    the schedule, empty for recorded images. `solver` made the stochastic steps. `frames` counts the video
    frames that each latent frame represents, in order. `negative` is the condition of the negative prompt,
    None with one pass.
    """

    condition: Condition
    path: Tensor
    at: Tensor
    times: Tensor
    guidance: float = 1.0
    passes: int = 1
    solver: Callable | None = None
    frames: tuple[int, ...] = ()
    negative: Condition | None = None


class FlowSteps(Steps, Protocol):
    """Training steps of a batch: the network's inputs, and how its velocities become log-probabilities."""

    conditioning: Conditioning

    def states(self) -> tuple[Tensor, Tensor]: ...  # latents (N, T, *L) and times (N, T)
    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput: ...  # of velocities (N, T, *L)


class Likelihood(Protocol):
    """What one training step of a flow model is, and its log-likelihood."""

    outputs: frozenset[str]  # the `extra` values it can give
    stochastic: bool  # it reads stochastic steps, so rollouts must have some

    def length(self, row: FlowRow) -> int: ...  # the number of steps
    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> FlowSteps: ...  # uids of the prompts


class FlowPolicy(Protocol):
    """Interface of flow policies for engines; `mmrl.diffusion.policies.flow` documents the methods."""

    pipe: Any
    family: PipelineFamily
    frozen: FrozenParts
    likelihood: Likelihood
    negative_prompt: str
    device: torch.device
    precision: torch.dtype

    def condition(self, request: Request, *, negative: bool = False) -> Condition: ...
    def passes(self, guidance: float) -> int: ...
    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor: ...
    def decode(self, latents: Tensor) -> Tensor: ...
    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory: ...


def segments_of(lengths: Sequence[int], segments: int) -> Tensor:
    """Assign consecutive spans of video frames to segments of equal duration: (len(lengths),) indices.

    `lengths` count the frames of each span: 1 for pixel frames, more for latent frames. A span belongs to the
    segment of its centre (the later one on a boundary), so to that of most of its frames.
    """
    length = torch.tensor(lengths)
    end = length.cumsum(0)
    twice_centre = 2 * end - length  # integers, so that boundaries are exact
    return twice_centre * segments // (2 * end[-1])
