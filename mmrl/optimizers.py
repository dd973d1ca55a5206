"""Optimizers: trained parameters to a torch optimizer. The learning rate is the run's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mmrl.registry import optimizer


@optimizer
def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (arXiv 1711.05101)."""
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)


@optimizer
def adamw_8bit(
    parameters: Iterable[nn.Parameter],
    *,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW with its two moments in 8 bits, from bitsandbytes (arXiv 2110.02861)."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError("optimizer 'adamw_8bit' needs bitsandbytes; install mmrl[lowbit]") from error
    return AdamW8bit(parameters, weight_decay=weight_decay, betas=(beta1, beta2), eps=eps)


@optimizer
def sgd(
    parameters: Iterable[nn.Parameter], *, momentum: float = 0.0, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Gradient descent with momentum."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=momentum, weight_decay=weight_decay)
