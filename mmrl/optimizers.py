"""Factories of torch optimizers for named trained parameters; the run sets the learning rate."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from mmrl.config.ranges import NonNegativeFloat, ShareBelowOne
from mmrl.config.registry import optimizer

Named = Sequence[tuple[str, nn.Parameter]]

_TOGETHER = 2**24  # largest number of elements in a batch of matrices to orthogonalise
_TABLES = re.compile(r"embed|lm_head")  # names of token embeddings and output heads


@optimizer
def adamw(
    named: Named,
    *,
    weight_decay: NonNegativeFloat = 0.0,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.999,
    eps: NonNegativeFloat = 1e-8,
) -> torch.optim.Optimizer:
    """Create AdamW: Adam with decoupled weight decay (arXiv 1711.05101).

    Args:
        weight_decay: Decoupled weight decay, at least 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the denominator.
    """
    return _adamw([p for _, p in named], weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)


def _adamw(weights: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    # Fused on a GPU, because torch's default makes a temporary copy of all second moments.
    return torch.optim.AdamW(weights, fused=all(p.is_cuda for p in weights) or None, **options)


@optimizer(packages={"bitsandbytes": "lowbit"})
def adamw_8bit(
    named: Named,
    *,
    weight_decay: NonNegativeFloat = 0.0,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.999,
    eps: NonNegativeFloat = 1e-8,
) -> torch.optim.Optimizer:
    """Create AdamW with its two moments in 8 bits, from bitsandbytes (arXiv 2110.02861).

    Args:
        weight_decay: Decoupled weight decay, at least 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the denominator.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError("optimizer 'adamw_8bit' needs bitsandbytes; install mmrl[lowbit]") from error
    return AdamW8bit([p for _, p in named], weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)


@optimizer
def sgd(
    named: Named, *, momentum: ShareBelowOne = 0.0, weight_decay: NonNegativeFloat = 0.0
) -> torch.optim.Optimizer:
    """Create stochastic gradient descent with momentum."""
    return torch.optim.SGD([p for _, p in named], lr=0.0, momentum=momentum, weight_decay=weight_decay)


@optimizer
def muon(
    named: Named,
    *,
    momentum: ShareBelowOne = 0.95,
    weight_decay: NonNegativeFloat = 0.0,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.99,
) -> torch.optim.Optimizer:
    """Create Muon for matrices with AdamW's learning rate (arXiv 2502.16982), AdamW for other parameters.

    Muon orthogonalises the momentum of matrices. The other parameters are embeddings and heads, biases, norms
    and convolutions. Matrices of equal shape are orthogonalised together, in bfloat16, or float32 on a CPU.

    Args:
        momentum: Momentum of the matrices, in [0, 1).
        weight_decay: Decoupled weight decay of all parameters, at least 0.
        beta1: AdamW's decay of the first moment, in [0, 1).
        beta2: AdamW's decay of the second moment, in [0, 1).
    """
    matrices, rest = [], []
    for name, parameter in named:  # convolutions have 3 dimensions or more
        (matrices if parameter.ndim == 2 and not _TABLES.search(name) else rest).append(parameter)
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(BatchedMuon(matrices, momentum=momentum, weight_decay=weight_decay))
    if rest:
        parts.append(_adamw(rest, weight_decay=weight_decay, betas=(beta1, beta2)))
    return Parted(parts)


class BatchedMuon(torch.optim.Muon):
    """torch's Muon, but orthogonalising all matrices of the same shape together.

    torch processes one matrix at a time, in bfloat16, which many CPUs emulate: small models spent more time
    on this than on their gradients. Updates are scaled by 0.2 sqrt(max(rows, columns)), to the size of
    AdamW's updates (section 2.2 of arXiv 2502.16982).

    Args:
        matrices: Trained matrices.
        lr: Learning rate.
        momentum: Nesterov momentum, in [0, 1).
        weight_decay: Decoupled weight decay, at least 0.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            matrices, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all weight matrices from their gradients."""
        for group in self.param_groups:
            alike: dict[Any, list[tuple[nn.Parameter, torch.Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = self._direction(parameter, group["momentum"])
                    kind = (parameter.shape, parameter.dtype, parameter.device, type(parameter.data))
                    alike[kind].append((parameter, direction))
            for pairs in alike.values():
                self._update(pairs, group)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        """Update the momentum of a parameter, and return its Nesterov direction."""
        state, gradient = self.state[parameter], cast(torch.Tensor, parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        return gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - momentum), momentum)

    def _update(self, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]], group: Mapping[str, Any]) -> None:
        """Update parameters of equal shape along their orthogonalised directions, in batches."""
        rate, shape = float(group["lr"]), pairs[0][0].shape
        # Shards (DTensor) are processed one by one.
        size = 1 if hasattr(pairs[0][0], "device_mesh") else max(1, _TOGETHER // shape.numel())
        for at in range(0, len(pairs), size):
            some = pairs[at : at + size]
            together = some[0][1] if size == 1 else torch.stack([direction for _, direction in some])
            updates = orthogonalize(together, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for (parameter, _), update in zip(some, [updates] if size == 1 else updates, strict=True):
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * 0.2 * max(shape) ** 0.5)


def orthogonalize(
    matrices: torch.Tensor,
    coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Bring all singular values of a batch of matrices near 1, by Newton-Schulz steps (arXiv 2502.16982).

    Args:
        coefficients: Coefficients of the powers 1, 3 and 5 of the matrix in a step.
        steps: Number of Newton-Schulz steps.
        eps: Lower limit of the norm that each matrix is divided by.
    """
    a, b, c = coefficients
    on_cpu = matrices.device.type == "cpu"
    dtype = torch.promote_types(matrices.dtype, torch.float32) if on_cpu else torch.bfloat16
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Parted(torch.optim.Optimizer):
    """An optimizer that consists of several optimizers, each for its own parameters."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        # Do not call torch's initialiser: parameter groups and state belong to the component optimizers.
        self.parts, self.defaults, self.state = parts, {}, {}
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:
        """Take a step with every component optimizer."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every component optimizer."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every component optimizer."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)  # this creates new parameter groups
        self.param_groups = [group for part in self.parts for group in part.param_groups]
