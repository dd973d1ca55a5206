"""Memory of every training run: weights, gradients, state of the optimizer, references."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mmrl.config.registry import find, memory_estimate
from mmrl.config.schema import Config
from mmrl.core.protocols import Policy
from mmrl.core.types import Prompt

SIDE = 64  # of the matrix on which the state of an optimizer is measured


@memory_estimate
def training(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Estimate weights, gradients, the state of the optimizer, and a copy of what trains per reference."""
    module = policy.module
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in learning)
    sizes = sum(parameter.nbytes for parameter in learning)
    return {
        "weights": sum(tensor.nbytes for tensor in tensors.values()),
        "gradients": sizes,
        "optimizer": numbers * optimizer_bytes(find("optimizer", config.learn.optimizer.name).target),
        "references": sizes * len(config.references),
    }


def optimizer_bytes(make: Callable[..., torch.optim.Optimizer]) -> float:
    """Measure the bytes of state per weight of an optimizer with its default options."""
    weight = nn.Parameter(torch.zeros(SIDE, SIDE))
    weight.grad = torch.ones_like(weight)
    optimizer = make([("weight", weight)])
    optimizer.step()
    return sum(t.nbytes for t in _tensors(optimizer.state_dict()) if t.ndim) / weight.numel()


def _tensors(tree: object) -> list[Tensor]:
    match tree:
        case Tensor():
            return [tree]
        case Mapping():
            return [t for value in tree.values() for t in _tensors(value)]
        case list() | tuple():
            return [t for value in tree for t in _tensors(value)]
    return []
