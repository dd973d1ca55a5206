"""What is done to modules of any kind: precision, transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LOW = (torch.bfloat16, torch.float16)


def keep_training_precision(model: nn.Module) -> None:
    """Hold trained weights in float32: steps of 1e-6 vanish in 16 bits. Frozen weights stay as they were
    loaded."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in LOW:
            parameter.data = parameter.data.float()


def apply_transforms(model: nn.Module, transforms: Sequence[Callable]) -> nn.Module:
    """Send a model through transforms in order."""
    for transform in transforms:
        model = transform(model)
    return model
