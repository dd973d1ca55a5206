"""The pieces of a training method, made from a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.config.binding import Bound
from mmrl.config.registry import Needs
from mmrl.core.protocols import Engine, Policy, Sampler
from mmrl.references import Reference


@dataclass
class Method:
    """The pieces of a training method: what samples, what is rewarded, and what is learned from it."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    references: Mapping[str, Reference]
    sampler: Sampler
    engine: Engine
    rewards: Sequence[Bound]
    group_filter: Bound
    chain: Sequence[Bound]  # of the advantage
    objective: Any
    learning_rate: Bound | float

    @property
    def needs(self) -> Needs:
        """What the objective reads."""
        return self.objective.needs

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer moves."""
        return [parameter for parameter in self.policy.module.parameters() if parameter.requires_grad]
