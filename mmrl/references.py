"""Reference policies: other weights of the trained parameters, swapped into the policy to evaluate it.

So a reference of an adapter is as small as the adapter, and one of a whole model is one copy of its trained
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt, Probability
from mmrl.config.registry import reference
from mmrl.core.protocols import Policy
from mmrl.core.step_table import Batch, StepOutput
from mmrl.runtime.fsdp import exchange, give_up


def trained(policy: Policy) -> dict[str, Tensor]:
    """Map names to trained parameters; names are the same on any number of processes."""
    return {
        # Data parallelism wraps the module, which puts a word before every name.
        name.removeprefix("module."): parameter
        for name, parameter in policy.module.named_parameters()
        if parameter.requires_grad
    }


class Reference:
    """A policy with other weights, which may follow the trained ones as a moving average.

    `decay` is the share of the old weights that stays after `every` optimizer steps; at 1 they never
    change.
    """

    def __init__(self, policy: Policy, decay: float, every: int = 1) -> None:
        self.policy = policy
        self.decay, self.every = decay, every
        self.passed = 0  # optimizer steps of the learner
        self.weights: dict[str, Tensor] = {}
        self.take()

    def take(self) -> None:
        """Take the policy's trained weights of now."""
        self.weights = {name: parameter.detach().clone() for name, parameter in trained(self.policy).items()}

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        with self.acting(), torch.no_grad():
            return self.policy(batch, extra)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Swap the reference's weights into the policy for the duration of the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        give_up(self.policy.module)  # else FSDP2 would go on with the weights that it gathered
        for name, parameter in trained(self.policy).items():
            self.weights[name] = exchange(parameter, self.weights[name])

    @torch.no_grad()
    def move(self) -> None:
        """Update the moving average after an optimizer step, every `every` steps."""
        self.passed += 1
        if self.decay < 1 and self.passed % self.every == 0:
            for name, parameter in trained(self.policy).items():
                # w + (1 - decay) (p - w) = decay w + (1 - decay) p
                self.weights[name].lerp_(parameter.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the number of optimizer steps seen."""
        return {"weights": dict(self.weights), "passed": self.passed}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights and the number of optimizer steps seen."""
        self.passed = state["passed"]
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])  # in place, so that `state` stays its owner's


@reference
def frozen(policy: Policy) -> Reference:
    """The policy as it was at the start of the run."""
    return Reference(policy, 1.0)


@reference
def ema(policy: Policy, *, decay: Probability = 0.99, every: PositiveInt = 1) -> Reference:
    """Exponential moving average of the policy.

    `decay` is the share of it that stays at an update, which comes after `every` optimizer steps
    (Flow-GRPO's code: 8).
    """
    return Reference(policy, decay, every)
