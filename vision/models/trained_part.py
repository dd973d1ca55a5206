"""Base class of weights that are trained instead of a policy's model, such as a steering vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from mmrl.core.types import Trajectory

ReadSteps = Callable[..., dict[str, Tensor]]  # takes steps, names of outputs, and a teacher


class TrainedPart:
    """Base class of weights that are trained instead of the model.

    A transform adds such a module to a model. The policy then trains, saves and loads only this module.

    Attributes:
        name: Description of the part, for error messages.
        cannot_merge: Error message of `merge`, because a model of transformers cannot hold these weights.
        outputs: Outputs per token that the policy computes only with this part.
    """

    name: ClassVar[str]
    cannot_merge: ClassVar[str]
    outputs: ClassVar[frozenset[str]] = frozenset()

    def collate(self, steps: Any, rollouts: Sequence[Trajectory]) -> Any:
        """Add the values that `read` needs to the steps of a batch."""
        return steps

    def read(self, read: ReadSteps, steps: Any, outputs: Any, teacher: Any) -> dict[str, Tensor]:
        """Compute the outputs of a batch with this part; `read`, the argument, runs the model's forward."""
        return read(steps, outputs, teacher)

    def save(self, folder: Path) -> None:
        """Write the weights to a folder."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote, bit for bit."""
        raise NotImplementedError


def part_of(model: nn.Module) -> Any:
    """Return the trained part that a transform added to a model; None if there is no such part."""
    return next((module for module in model.modules() if isinstance(module, TrainedPart)), None)


def holds_part(folder: Path) -> bool:
    """Return whether a checkpoint folder has weights of a trained part only, not of a model."""
    names = [file.name for file in folder.glob("*.safetensors")]
    return bool(names) and not any(name.startswith("model") for name in names)
