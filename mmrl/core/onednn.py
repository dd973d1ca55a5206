"""Computes large float32 linear layers with oneDNN on x86 CPUs.

torch multiplies float32 matrices with MKL, which uses half of the speed of some x86 processors with AVX-512.
oneDNN, which torch brings along, uses all of it; without AVX-512 it is slower, and is not used. Products are
summed in another order. benchmarks/grpo_step.py measures the speed-up.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

MANY = 1 << 16  # elements of a weight above which oneDNN is faster
MOST = 4 << 30  # bytes of weights that may be copied into the packed layout
BUILT = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and platform.machine().lower() in ("x86_64", "amd64")
)
# With AVX2 alone (Zen 3) a thread reaches 103 GFLOP/s by MKL and 77 by oneDNN.
FASTER = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def onednn(model: nn.Module, *, pack: bool = False) -> Iterator[None]:
    """Compute the large linear layers of a model with oneDNN inside this context, forward and backward.

    This concerns unsharded float32 weights on an x86 CPU, outside of autocast. With `pack`, weights are
    copied once into the layout of oneDNN's kernels, for calls without gradient on a few rows each, up to
    4 GiB of weights; they must not change meanwhile.
    """
    inside = there()
    # A subclass may compute something else, and so may a layer whose forward was replaced.
    layers = [
        m
        for m in model.modules()
        if inside and type(m) is nn.Linear and "forward" not in vars(m) and _fits(m.weight)
    ]
    pack = pack and sum(layer.weight.nbytes for layer in layers) <= MOST
    for layer in layers:
        layer.forward = _forward(layer, pack)  # pyright: ignore[reportAttributeAccessIssue]
    token = _INSIDE.set(inside)
    try:
        yield
    finally:
        _INSIDE.reset(token)
        for layer in layers:
            del layer.forward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply (..., n) by the rows of a weight (m, n), which may be a part of a layer's.

    Inside `onednn` this uses oneDNN as layers do, elsewhere torch.
    """
    if _INSIDE.get() and _fits(weight) and _suits(x):
        return _Linear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def there() -> bool:
    """Return whether oneDNN is available and would be used for float32 weights."""
    return BUILT and FASTER and torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")


def _fits(weight: Tensor) -> bool:
    whole = type(weight) in (Tensor, nn.Parameter) and weight.layout is torch.strided
    return whole and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > MANY


def _suits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.dim() > 1 and x.numel() > 0


def _forward(layer: nn.Linear, pack: bool) -> Callable[[Tensor], Tensor]:
    """Make the forward function of a layer inside `onednn`."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()) if pack else None

    def forward(x: Tensor) -> Tensor:
        if packed is None or torch.is_grad_enabled() or not _suits(x):
            return linear(x, layer.weight, layer.bias)
        return _multiply(x, packed, layer.bias)

    return forward


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply (..., n) by the rows of (m, n) with oneDNN, to (..., m), without gradient."""
    # For a slice of wider rows oneDNN falls back to reference code, a thousand times slower.
    whole = weight.is_contiguous() or weight.t().is_contiguous()
    return _multiply(x, weight if whole else weight.contiguous(), bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # no fused activation


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # it may be an expanded scalar
        for_x = times(grad, weight.t()) if ctx.needs_input_grad[0] else None  # (..., m) @ (m, n)
        rows, seen = grad.flatten(0, -2), x.flatten(0, -2)
        for_weight = times(rows.t(), seen.t()) if ctx.needs_input_grad[1] else None  # (m, r) @ (r, n)
        return for_x, for_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
