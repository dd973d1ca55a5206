"""Second models that learn beside the policy: what the loop needs to update and to save them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from mmrl.config.binding import Bound
from mmrl.config.registry import Needs
from mmrl.config.schema import Config
from mmrl.core.protocols import LogProbs, Policy
from mmrl.core.rng import Stream
from mmrl.references import SecondModel
from mmrl.runtime.distributed import Processes
from mmrl.training.nonfinite import Guard, WithObjective

FOLDER = "references"  # of a checkpoint: the second models by name


class Learning(WithObjective, Protocol):
    """What the loop updates: the policy of a run, or a second model."""

    processes: Processes
    guard: Guard

    @property
    def minibatches(self) -> int:
        """Optimizer steps per pass."""
        ...

    def step_optimizer(self) -> None:
        """Take an optimizer step."""


@dataclass
class SecondLearner:
    """A second model of a run with its optimizer, and a guard of its updates."""

    name: str  # in `references`
    model: SecondModel
    optimizer: torch.optim.Optimizer
    processes: Processes
    config: Config
    stream: Stream
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        steps = self.config.learn.micro_batch_steps
        self.guard = Guard(self.config, self, self.processes, self.stream, print, steps, of=self.name)

    @property
    def policy(self) -> Policy:
        """The model."""
        return self.model.model

    @property
    def objective(self) -> Any:
        """What it minimises."""
        return self.model.objective

    @property
    def needs(self) -> Needs:
        """What the objective reads."""
        return self.objective.needs

    @property
    def chain(self) -> Sequence[Bound]:
        """The pieces that give every step what the model learns from."""
        return self.model.advantage

    @property
    def minibatches(self) -> int:
        """Optimizer steps per pass."""
        return self.model.minibatches

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer moves."""
        return [parameter for parameter in self.policy.module.parameters() if parameter.requires_grad]

    def others(self, references: Mapping[str, LogProbs]) -> dict[str, LogProbs]:
        """Choose the policies whose log-probabilities its batch needs; `old` is the model itself."""
        asked = {name: references[name] for name in self.needs.others if name in references}
        if self.model.num_iterations * self.minibatches > 1 or "old" in self.needs.others:
            asked["old"] = self.policy
        return asked

    def step_optimizer(self) -> None:
        """Take an optimizer step at the learning rate of now, unless the gradient is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.model.learning_rate
        self.guard.step_optimizer()

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, by the model's name."""
        metrics = self.guard.meter.take().items()
        # Moments of importance weights are those of the policy's own update.
        return {f"{self.name}/{key}": value for key, value in metrics if not key.startswith("moments/")}

    def save(self, checkpoint: Path) -> None:
        """Write the model into a checkpoint; its weights have to be whole."""
        self.policy.save(checkpoint / FOLDER / self.name)

    def load(self, checkpoint: Path) -> None:
        """Load the weights that `save` wrote."""
        self.policy.load(checkpoint / FOLDER / self.name)

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs besides the weights. Every process has to call this."""
        return {"optimizer": self.processes.state_of(self.optimizer), "guard": self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the weights have to be loaded before."""
        self.processes.take_up(self.optimizer, state["optimizer"], self.trained)
        self.guard.load_state_dict(state["guard"])
