"""Data types of flow rollouts: text conditions, recorded paths and training steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmrl.core.step_table import StepOutput
from mmrl.core.types import Outcome, Prompt, Steps, Trajectory, Unit
from mmrl.diffusion.frozen_parts import FrozenParts
from mmrl.diffusion.model_family import Condition, Guidance, PipelineFamily, Request
from mmrl.diffusion.sizes import places_by


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Conditions (encoded prompts) and guidance of `B` rows; equal conditions are stored once.

    `passes` is the number of network calls for one velocity: 2 with classifier-free guidance, else 1.
    `negatives` holds the condition of the negative prompt for each of `conditions`; empty with one pass.
    """

    conditions: tuple[Condition, ...]
    which: Tensor  # (B,) index of each row's condition in `conditions`
    guidance: Guidance = 1.0
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
        conditions: Sequence[Condition], guidance: Guidance, passes: int, negatives: Sequence[Condition] = ()
    ) -> Conditioning:
        """Create a `Conditioning`; a condition object that several rows share is stored once."""
        first = {id(condition): i for i, condition in reversed([*enumerate(conditions)])}
        chosen = sorted(first.values())
        which = torch.tensor([chosen.index(first[id(condition)]) for condition in conditions])
        distinct, without = (
            tuple(several[i] for i in chosen) if several else () for several in (conditions, negatives)
        )
        return Conditioning(distinct, which, guidance, passes, without)

    @staticmethod
    def of_rows(rows: Sequence[FlowRow], piece: str) -> Conditioning:
        """Batch the conditions of rows; raises, naming `piece`, if guidance or network calls differ."""
        settings = {(row.guidance, row.passes) for row in rows}
        if len(settings) > 1:
            raise ValueError(
                f"{piece} wants rows of one guidance scale, but got rows of (guidance, network calls) "
                f"{sorted(settings, key=str)}; recorded images count as guidance 1"
            )
        negatives = [row.negative for row in rows if row.negative is not None]
        return Conditioning.of([row.condition for row in rows], rows[0].guidance, rows[0].passes, negatives)


@dataclass(frozen=True, eq=False)
class FlowRow:
    """Latents, schedule and settings of one generated or recorded image or video.

    `path` (P, *L) holds the latents at the times of the schedule, or only the finished latent if no path was
    recorded. `at` (T,) holds the indices in `path` at which the recorded steps start. `times` (S + 1,) is the
    schedule of S steps, empty for recorded images. `solver` sampled the stochastic steps. `frames` counts the
    video frames that each latent frame represents. `negative` is the condition of the negative prompt, None
    with one pass.
    """

    condition: Condition
    path: Tensor
    at: Tensor
    times: Tensor
    guidance: Guidance = 1.0
    passes: int = 1
    solver: Callable | None = None
    frames: tuple[int, ...] = ()
    negative: Condition | None = None


class FlowSteps(Steps, Protocol):
    """Training steps with latents of one size: network inputs, and log-likelihoods from velocities."""

    conditioning: Conditioning

    def states(self) -> tuple[Tensor, Tensor]: ...  # latents (N, T, *L) and times (N, T)
    def read(self, velocity: Tensor, extra: Set[str]) -> StepOutput: ...  # velocity (N, T, *L)


@dataclass(frozen=True, eq=False)
class SizedSteps:
    """Training steps of `N` rows with latents of several sizes: one part per size, the largest first."""

    parts: tuple[FlowSteps, ...]
    buckets: Tensor  # (N,) index of each row's part in `parts`
    row: Tensor  # (N,) index of each row inside its part

    @property
    def unit(self) -> Unit:
        """The smallest unit (step or row) whose loss can be computed alone; it is the same for all parts."""
        return self.parts[0].unit

    def cost(self, rows: Tensor) -> int:
        """Count the network calls that these rows need."""
        inside = [self.row[rows[self.buckets[rows] == i]] for i in range(len(self.parts))]
        return sum(part.cost(own) for part, own in zip(self.parts, inside, strict=True) if len(own))

    def __getitem__(self, cut: tuple[Tensor, slice]) -> Steps:
        rows, columns = cut
        held = self.buckets[rows].unique().tolist()
        parts = tuple(self.parts[i][self.row[rows[self.buckets[rows] == i]], columns] for i in held)
        return parts[0] if len(held) == 1 else SizedSteps(parts, *renumbered(self.buckets[rows]))

    def join(self, outputs: Sequence[StepOutput]) -> StepOutput:
        """Join the outputs of `parts`, one for each latent size, to outputs in the order of the rows.

        Raises `ValueError` for outputs with the shape of latents, because these differ in size.
        """
        order = torch.cat([(self.buckets == i).nonzero()[:, 0] for i in range(len(self.parts))]).argsort()
        for name, value in outputs[0].extra.items():
            if value.ndim > 2:
                raise ValueError(
                    f"rows of several sizes are in one micro-batch, and the objective reads their `{name}`, "
                    "which has other shapes for other sizes; the rows of a group must have one size here"
                )
        extra = {name: torch.cat([one.extra[name] for one in outputs])[order] for name in outputs[0].extra}
        return StepOutput(torch.cat([one.logp for one in outputs])[order], extra)


def collate_sizes(rows: Sequence[FlowRow], make: Callable[[list[int]], FlowSteps]) -> Steps:
    """Batch rows to training steps: calls `make` once per latent size, with the indices of its rows."""
    groups = places_by(tuple(row.path.shape[1:]) for row in rows)
    groups.sort(key=lambda places: -rows[places[0]].path[0].numel())  # largest latents first
    if len(groups) == 1:
        return make(groups[0])
    buckets = torch.zeros(len(rows), dtype=torch.int64)
    for i, places in enumerate(groups):
        buckets[places] = i
    return SizedSteps(tuple(make(places) for places in groups), *renumbered(buckets))


def renumbered(buckets: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber bucket ids (N,) from 0, and number the rows inside each bucket; returns two tensors (N,)."""
    buckets = buckets.unique(return_inverse=True)[1]
    return buckets, (buckets[:, None] == buckets).tril(-1).sum(1)


class Likelihood(Protocol):
    """Interface that defines the training steps of a flow model's rows and their log-likelihood."""

    outputs: frozenset[str]  # names of the `extra` outputs that it can compute
    stochastic: bool  # whether rollouts must be sampled with a stochastic solver

    def length(self, row: FlowRow) -> int: ...  # the number of training steps
    def collate(self, rows: Sequence[FlowRow], uids: Sequence[str]) -> Steps: ...  # uids of the prompts


class FlowPolicy(Protocol):
    """Interface of flow policies for engines; `mmrl.diffusion.policies.flow` documents the methods."""

    pipe: Any
    family: PipelineFamily
    frozen: FrozenParts
    likelihood: Likelihood
    negative_prompt: str
    device: torch.device
    precision: torch.dtype
    max_sequence_length: int
    module: nn.Module
    stages: Mapping[str, float]
    trained: Mapping[str, nn.Module]

    def condition(self, request: Request, *, negative: bool = False) -> Condition: ...
    def stored(self, requests: Sequence[Request]) -> bool: ...
    def passes(self, guidance: float) -> int: ...
    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor: ...
    def decode(self, latents: Tensor) -> Tensor: ...
    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory: ...


def segments_of(lengths: Sequence[int], segments: int) -> Tensor:
    """Assign consecutive spans of video frames to segments of equal duration: (len(lengths),) indices.

    `lengths` are frames per span: 1 for pixel frames, more for latent frames. A span belongs to the segment
    that contains its centre, and so most of its frames; a centre on a boundary belongs to the later segment.
    """
    length = torch.tensor(lengths)
    end = length.cumsum(0)
    twice_centre = 2 * end - length  # integers, so that boundaries are exact
    return twice_centre * segments // (2 * end[-1])
