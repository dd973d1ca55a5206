"""What the loops see of pieces. Everything else about a piece is its own business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory

if TYPE_CHECKING:
    from mmrl.core.reward_table import Measured, RewardTable
    from mmrl.core.step_table import Batch, StepOutput


class Policy(Protocol):
    """Gives every step a log-probability, and is what learns."""

    module: nn.Module  # its trainable parameters are what the optimizer moves
    says: frozenset[str]  # what it can put into `extra`

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Turn a recorded answer into a row."""

    def collate(self, rollouts: Rollouts) -> Batch:
        """Pad rows to a table."""

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        """Say how likely every step is, differentiably."""

    def save(self, folder: Path) -> None:
        """Write the model as an ordinary folder of its library."""

    def load(self, folder: Path) -> None:
        """Take up the weights that `save` wrote, bit for bit."""


class Engine(Protocol):
    """Makes one rollout for every entry of `prompts`. Text generation, denoising and reading stored pairs are
    all engines."""

    policy: Policy
    notes: frozenset[str]  # what it notes of every step

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order; equal entries form a group."""


class Sampler(Protocol):
    """Chooses prompts, and how often each is answered."""

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Name one prompt per rollout wanted; nothing once there is no question left."""


class HeldOut(Protocol):
    """Measures a policy on prompts that it is not trained on."""

    data: Sequence[Prompt]

    def measure(self) -> Measured:
        """Answer and score every prompt, and compute the metrics."""


class Tracker(Protocol):
    """Passes numbers on to a dashboard. Only the main process opens one."""

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> str:
        """Begin, or go on, at a step; give what there is to say about it."""

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass on the finite numbers of a step."""

    def close(self) -> None:
        """Finish."""


@runtime_checkable
class Telling(Protocol):
    """A piece with numbers of its own for the report of a step."""

    def tell(self) -> Mapping[str, float]:
        """Give what was measured since the last call, under the same names on every process."""


@runtime_checkable
class Stateful(Protocol):
    """A piece with a memory that is saved with the run."""

    def state_dict(self) -> dict[str, Any]:
        """Give tensors, numbers and strings, nested in dictionaries."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off."""


@runtime_checkable
class Observer(Stateful, Protocol):
    """A piece with memory that sees every round of a collection once, before anything is dropped."""

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Learn from a round."""
