"""Computes large float32 linear layers with oneDNN on x86 CPUs.

torch multiplies float32 matrices with MKL, which reaches half of the speed of some x86 processors with
AVX-512; oneDNN, which is part of torch, reaches all of it. Without AVX-512 oneDNN is slower, and only used
for a few rows with packed weights, as in decoding. Sums have another order. benchmarks/grpo_step.py measures
the speed-up.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

MANY = 1 << 16  # elements of a weight above which oneDNN is faster
MOST = 4 << 30  # largest size of packed weights in bytes
BUILT = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and platform.machine().lower() in ("x86_64", "amd64")
)
# With AVX2 alone (Zen 3) a thread reaches 103 GFLOP/s by MKL and 77 by oneDNN; with packed weights and these
# numbers of rows, oneDNN takes 0.6 to 1 times as long as MKL, which reads weights at half of their bandwidth.
FASTER = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
FEW = range(2, 49)
# Layers of transformers' models that read the same input; when weights are packed, theirs are one weight.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PLAIN = (Tensor, nn.Parameter)  # types of weights that are not sharded
_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def onednn(model: nn.Module, *, pack: bool = False) -> Iterator[dict[int, Packed]]:
    """Compute the large linear layers of a model with oneDNN inside this context, forward and backward.

    Only unsharded float32 weights on an x86 CPU, outside of autocast. With `pack`, up to 4 GiB of weights are
    copied once into the layout of oneDNN's kernels, for calls without gradient on a few rows; they must not
    change inside the context. Yields the packed weights by the id of their layers.
    """
    inside = there()
    groups = [group for group in _groups(model) if _fits(group)] if inside or pack and usable() else []
    made: list[tuple[Sequence[nn.Linear], Packed]] = []
    if pack and sum(layer.weight.nbytes for group in groups for layer in group) <= MOST:
        made = [(group, Packed(group)) for group in groups]
        forwards = [(m, partial(packed, i)) for group, packed in made for i, m in enumerate(group)]
    else:
        alone = [m for group in groups for m in group if inside and _fits([m])]
        forwards = [(layer, partial(_unpacked, layer)) for layer in alone]
    for layer, forward in forwards:
        layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    token = _INSIDE.set(inside)
    try:
        yield {id(layer): packed for group, packed in made for layer in group}
    finally:
        _INSIDE.reset(token)
        for layer, _ in forwards:
            del layer.forward


def packed_bytes(model: nn.Module) -> int:
    """Compute the bytes of weights that `onednn(model, pack=True)` copies, also for fake weights."""
    groups = _groups(model, (*PLAIN, FakeTensor))
    layers = [layer for group in groups if usable() and _fits(group) for layer in group]
    size = sum(layer.weight.nbytes for layer in layers)
    return size if size <= MOST else 0


def _groups(model: nn.Module, kinds: tuple[type, ...] = PLAIN) -> Iterator[list[nn.Linear]]:
    """Yield groups of plain linear layers of a model that read the same input."""
    seen: set[int] = set()
    for module in model.modules():
        children = dict(module.named_children())
        for names in SIBLINGS:
            group = [child for name in names if is_plain(child := children.get(name), kinds)]
            if len(group) == len(names) and len({layer.in_features for layer in group}) == 1:
                seen.update(map(id, group))
                yield group
    yield from ([m] for m in model.modules() if is_plain(m, kinds) and id(m) not in seen)


def is_plain(layer: nn.Module | None, kinds: tuple[type, ...] = PLAIN) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer with an unsharded float32 weight on the CPU."""
    # A subclass may compute something else, and so may a layer whose forward was replaced.
    return type(layer) is nn.Linear and "forward" not in vars(layer) and _is_whole(layer.weight, kinds)


def is_replaced(module: nn.Module) -> bool:
    """Whether an open `onednn` context replaced the forward of a module."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and (isinstance(forward.func, Packed) or forward.func is _unpacked)


def side_by_side(
    layers: Sequence[nn.Linear], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights of layers with the same input to (m, n), and their biases, if any, to (m,)."""
    biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in layers]
    bias = torch.cat(biases).to(dtype) if any(x.bias is not None for x in layers) else None
    return torch.cat([x.weight.detach().to(dtype) for x in layers]), bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a weight (m, n), possibly a slice of a layer's, to (..., n).

    Inside `onednn` this uses oneDNN, elsewhere torch.
    """
    if _INSIDE.get() and _is_whole(weight) and weight.numel() > MANY and _suits(x):
        return _Linear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def usable() -> bool:
    """Whether oneDNN is available for float32 weights."""
    return BUILT and torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")


def there() -> bool:
    """Whether oneDNN is available and faster than MKL for float32 weights, packed or not."""
    return FASTER and usable()


def _is_whole(weight: Tensor, kinds: tuple[type, ...] = PLAIN) -> bool:
    whole = type(weight) in kinds and weight.layout is torch.strided
    return whole and weight.device.type == "cpu" and weight.dtype == torch.float32


def _fits(layers: Sequence[nn.Linear]) -> bool:
    return sum(layer.weight.numel() for layer in layers) > MANY


def _suits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.dim() > 1 and x.numel() > 0


def _unpacked(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


class Packed:
    """Packed weights of layers with the same input; a call of the first layer computes all of them."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        weight, self.bias = side_by_side(layers)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.read: tuple[Tensor | None, int] = None, 0  # the last input, and the version that was read
        self.parts: dict[int, Tensor] = {}  # of what was computed for `read`, what no layer has taken yet

    def __call__(self, number: int, x: Tensor) -> Tensor:
        """Compute the layer of this number."""
        if not self.suits(x):
            return _unpacked(self.layers[number], x)
        if len(self.layers) == 1:
            return self.multiply(x)
        version = 0 if x.is_inference() else x._version  # `_version` counts in-place writes to a tensor
        if self.read[0] is not x or self.read[1] != version or number not in self.parts:
            products = self.multiply(x).split(self.sizes, -1)
            self.read, self.parts = (x, version), dict(enumerate(products))
        part = self.parts.pop(number)
        if not self.parts:
            self.read = None, 0
        return part

    def suits(self, x: Tensor) -> bool:
        """Whether the packed weights can be used for this input and are faster."""
        few = FASTER or x.numel() // max(1, x.shape[-1]) in FEW
        return few and not torch.is_grad_enabled() and _suits(x)

    def multiply(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Compute the concatenated outputs (..., m) of all layers, plus another tensor of this shape."""
        if other is None:
            return _multiply(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")


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
