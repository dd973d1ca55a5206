"""Linear layers through oneDNN, on a CPU.

torch multiplies float32 matrices by MKL, which leaves half of the speed of some x86 processors unused. oneDNN
comes with torch as well, and does not. Products are those of float32, summed in another order. `grpo_step` in
benchmarks measures what it brings.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

MANY = 1 << 16  # numbers of a weight above which a call of oneDNN is worth its while
MOST = 4 << 30  # bytes of all weights that may lie in memory a second time
_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def onednn(model: nn.Module, *, pack: bool = False) -> Iterator[None]:
    """Compute the large linear layers of a model through oneDNN for a while, forwards and backwards.

    Only whole float32 weights on an x86 CPU are, and nothing under autocast. With `pack` weights are laid out
    once as its kernels read them, for calls without gradient on a few rows each, up to 4 GiB of weights; they
    must not change meanwhile.
    """
    inside = there()
    layers = [layer for layer in model.modules() if _plain(layer)] if inside else []
    pack = pack and sum(layer.weight.nbytes for layer in layers) <= MOST
    for layer in layers:
        layer.forward = _forward(layer, pack)
    token = _INSIDE.set(inside)
    try:
        yield
    finally:
        _INSIDE.reset(token)
        for layer in layers:
            del layer.forward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply (..., n) by the rows of a weight (m, n) that is no layer's own, a part of one for instance:
    inside `onednn` as layers do there, else as torch does."""
    if _INSIDE.get() and _fits(weight) and _suits(x):
        return _Linear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def there() -> bool:
    """Tell whether oneDNN is there, and would compute what is asked for."""
    return _built() and torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")


@cache
def _built() -> bool:
    here = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return here and platform.machine().lower() in ("x86_64", "amd64")


def _fits(weight: Tensor) -> bool:
    whole = type(weight) in (Tensor, nn.Parameter) and weight.layout is torch.strided
    return whole and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > MANY


def _suits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.dim() > 1 and x.numel() > 0


def _plain(layer: nn.Module) -> bool:
    # A subclass may compute something else, and so may a layer whose forward somebody has replaced.
    return type(layer) is nn.Linear and "forward" not in vars(layer) and _fits(layer.weight)


def _forward(layer: nn.Linear, pack: bool) -> Callable[[Tensor], Tensor]:
    """Make what a layer computes meanwhile."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()) if pack else None

    def forward(x: Tensor) -> Tensor:
        if packed is None or torch.is_grad_enabled() or not _suits(x):
            return linear(x, layer.weight, layer.bias)
        return _multiply(x, packed, layer.bias)

    return forward


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply (..., n) by the rows of (m, n) through oneDNN: (..., m). No gradient goes through."""
    # A part of wider rows has no kernel: the reference code that it falls back to is a thousand times slower.
    whole = weight.is_contiguous() or weight.t().is_contiguous()
    return _multiply(x, weight if whole else weight.contiguous(), bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # it may be one number, seen everywhere
        for_x = times(grad, weight.t()) if ctx.needs_input_grad[0] else None
        rows, seen = grad.flatten(0, -2), x.flatten(0, -2)
        for_weight = times(rows.t(), seen.t()) if ctx.needs_input_grad[1] else None
        return for_x, for_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
