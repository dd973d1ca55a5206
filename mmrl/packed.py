"""Linear layers whose weights lie as a processor's kernels want them, for as long as they do not change.

oneDNN reads a weight in blocks. A weight that is laid out once, and then read for every token of a rollout,
is read at about twice the speed of the rows that torch keeps (see `grpo_step` in benchmarks). Nothing else
changes: the products are those of float32, summed in another order.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LEAST = 1 << 16  # numbers of a weight; with fewer, calling oneDNN costs more than it saves
MOST = 4 << 30  # bytes of all weights that may lie in memory a second time


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Compute a model's linear layers with packed weights for a while, wherever no gradient is wanted.

    Only whole float32 weights on an x86 CPU are packed, and nothing under autocast; weights must not change
    meanwhile. Where a model has over 4 GiB of them, none is: they are held a second time.
    """
    layers = [layer for layer in model.modules() if _packs(layer)] if _useful() else []
    if sum(layer.weight.nbytes for layer in layers) > MOST:
        layers = []
    for layer in layers:
        layer.forward = _forward(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _useful() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and platform.machine().lower() in ("x86_64", "amd64")
        and not torch.is_autocast_enabled("cpu")
    )


def _packs(layer: nn.Module) -> bool:
    # A subclass may compute something else, and so may a layer whose forward somebody has replaced.
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    weight = layer.weight
    plain = type(weight) in (Tensor, nn.Parameter) and weight.layout is torch.strided
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LEAST


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Make what a layer computes while it is packed."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
    bias = None if layer.bias is None else layer.bias.detach()

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.numel():
            return nn.functional.linear(x, layer.weight, layer.bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return forward
