"""Reference policies: the policy with other weights, and additional trained models, such as critics.

`frozen` and `ema` swap their weights into the policy, so they store trained weights only (for an adapter,
only the adapter).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, PositiveInt, Probability
from mmrl.config.registry import reference
from mmrl.config.schema import Piece
from mmrl.core.protocols import Policy, ReadsSteps
from mmrl.core.step_table import Batch, StepOutput
from mmrl.runtime.fsdp import reshard, swap


def trained(policy: Policy) -> dict[str, Tensor]:
    """Return the policy's trained parameters by name, without the prefix of data parallelism."""
    return {
        # Data parallelism wraps the module, which adds a prefix to every name.
        name.removeprefix("module."): parameter
        for name, parameter in policy.module.named_parameters()
        if parameter.requires_grad
    }


class Reference:
    """The policy with other weights: a fixed copy, or a moving average of the trained weights.

    Args:
        policy: The policy that is trained.
        decay: Weight of the old average in an update; 1: the weights never change.
        every: Number of optimizer steps between updates of the average.
    """

    def __init__(self, policy: Policy, decay: float, every: int = 1) -> None:
        self.policy = policy
        self.decay, self.every = decay, every
        self.passed = 0  # number of optimizer steps of the learner so far
        self.weights: dict[str, Tensor] = {}
        self.snapshot()

    def snapshot(self) -> None:
        """Copy the policy's current trained weights into this reference."""
        self.weights = {name: parameter.detach().clone() for name, parameter in trained(self.policy).items()}

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        with self.rollout_weights(), torch.no_grad():
            return self.policy(batch, extra)

    @contextmanager
    def rollout_weights(self) -> Iterator[None]:
        """Swap the reference's weights into the policy inside this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        reshard(self.policy.module)  # drop weights that FSDP2 has gathered before
        for name, parameter in trained(self.policy).items():
            self.weights[name] = swap(parameter, self.weights[name])

    @torch.no_grad()
    def update(self) -> None:
        """Count an optimizer step, and update the moving average after every `every` steps."""
        self.passed += 1
        if self.decay < 1 and self.passed % self.every == 0:
            for name, parameter in trained(self.policy).items():
                # w + (1 - decay) (p - w) = decay w + (1 - decay) p
                self.weights[name].lerp_(parameter.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's weights and the number of optimizer steps so far."""
        return {"weights": dict(self.weights), "passed": self.passed}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the reference's weights and the number of optimizer steps."""
        self.passed = state["passed"]
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])  # in place, so that `state` is not shared


@reference
def frozen(policy: Policy) -> Reference:
    """Create a reference with the weights of the policy at the start of the run."""
    return Reference(policy, 1.0)


@reference
def ema(policy: Policy, *, decay: Probability = 0.99, every: PositiveInt = 1) -> Reference:
    """Create a reference with an exponential moving average of the policy's weights.

    `decay` is the weight of the old average in an update. An update follows every `every` optimizer steps
    (Flow-GRPO's code: 8).
    """
    return Reference(policy, decay, every)


def other_models(references: Mapping[str, Any]) -> set[str]:
    """Return the names of the references that are other models than the policy, such as teachers."""
    return {name for name, reference in references.items() if not isinstance(reference, Reference)}


@reference(copies_policy=True)
@dataclass(eq=False)
class SecondModel:
    """An additional model that is trained beside the policy: a critic, or a process reward model.

    Like the policy, the model has its own advantage functions, which compute a target per step, such as the
    value to predict, and its own objective, which fits these targets. The run's advantage functions and
    objectives read the model's outputs by its name in `references`. It is placed on devices, saved and
    resumed like the policy; a checkpoint has its weights in the folder `references/NAME`.

    Args:
        learning: The policy of the run, whose rows this model reads.
        advantage: Functions, in order, that turn rewards into a learning target per step; they can read
            values recorded per step, such as "critic/value".
        objective: Loss to minimise.
        policy: The model; None: one like the run's policy.
        optimizer: Optimizer of its weights.
        learning_rate: Learning rate of the optimizer.
        num_iterations: Passes over the rollouts of a training step.
        minibatches: Optimizer steps per pass.
        learns_first: Learn from a step's rollouts before, not after, the run's advantage functions read the
            model's outputs (PRIME).
    """

    learning: Policy
    _: KW_ONLY
    advantage: tuple[Bound, ...]
    objective: Any
    policy: Callable[[], Policy] | None = None
    optimizer: Callable = Piece("adamw")
    learning_rate: NonNegativeFloat = 1e-6
    num_iterations: PositiveInt = 1
    minibatches: PositiveInt = 1
    learns_first: bool = False
    decay: ClassVar[float] = 1.0  # as in `Reference`: `update` changes no weights
    holds: ClassVar[str] = "a model that learns"  # used by memory estimates

    def __post_init__(self) -> None:
        if self.policy is None:
            raise ConfigError("a second model needs a `policy`: the model that learns")
        self.model = self.policy()
        if isinstance(self.model, ReadsSteps):
            self.model.check_steps_of(self.learning)
        missing = self.objective.needs.outputs - self.model.outputs
        if missing:
            raise ConfigError(
                f"the objective of a second model reads {sorted(missing)} of it, but it says "
                f"{sorted(self.model.outputs) or 'nothing'} besides log-probabilities"
            )

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        with torch.no_grad():
            return self.model(batch, extra)

    def rollout_weights(self) -> AbstractContextManager:
        """Raise `ConfigError`, because engines sample from the policy's own model."""
        raise ConfigError(
            "'rollout.policy' names a second model, which cannot sample: name a reference of the policy's "
            "own weights (`frozen`, `ema`)"
        )

    def snapshot(self) -> None:
        """Do nothing: the model has separate weights."""

    def update(self) -> None:
        """Do nothing: the model has its own optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the run saves the model and its optimizer."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the run restores the model and its optimizer."""
