"""Optimizers of named trained parameters, as torch optimizers; the run sets the learning rate."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmrl.config.ranges import NonNegativeFloat, ShareBelowOne
from mmrl.config.registry import optimizer

Named = Sequence[tuple[str, nn.Parameter]]

_TABLES = re.compile(r"embed|lm_head")  # a row of these is a token: they are not maps from space to space


@optimizer
def adamw(
    named: Named,
    *,
    weight_decay: NonNegativeFloat = 0.0,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.999,
    eps: NonNegativeFloat = 1e-8,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Args:
        weight_decay: Decoupled weight decay, at least 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the denominator.
    """
    return torch.optim.AdamW([p for _, p in named], weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)


@optimizer(packages={"bitsandbytes": "lowbit"})
def adamw_8bit(
    named: Named,
    *,
    weight_decay: NonNegativeFloat = 0.0,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.999,
    eps: NonNegativeFloat = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW with its two moments in 8 bits, from bitsandbytes (arXiv 2110.02861).

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
    """Gradient descent with momentum."""
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
    """Muon for matrices with AdamW's learning rate (arXiv 2502.16982), AdamW for all other parameters.

    Muon orthogonalises the momentum of matrices. The others are embeddings and heads, biases, norms and
    convolutions.

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
        # Scales updates by 0.2 sqrt(max(rows, columns)), to the size of AdamW's (section 2.2 of the paper).
        options = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        parts.append(torch.optim.Muon(matrices, weight_decay=weight_decay, **options))
    if rest:
        parts.append(torch.optim.AdamW(rest, weight_decay=weight_decay, betas=(beta1, beta2)))
    return Parted(parts)


class Parted(torch.optim.Optimizer):
    """Several optimizers as one, each over its own parameters."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        # What torch's own initialiser would make anew belongs to the parts.
        self.parts, self.defaults, self.state = parts, {}, {}
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:
        """Update all parameters."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the parts."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)  # which makes its groups anew
        self.param_groups = [group for part in self.parts for group in part.param_groups]
