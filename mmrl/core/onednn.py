"""Computation of large float32 linear layers with oneDNN on x86 CPUs.

By default torch multiplies float32 matrices with MKL. On some x86 processors with AVX-512, MKL reaches half
of the peak speed, and oneDNN (a part of torch) all of it. Without AVX-512, oneDNN is slower; it is then used
only for few rows and packed weights, as in decoding. Results differ in rounding, because sums are computed
in another order. benchmarks/grpo_step.py measures the speed-up.
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

MANY = 1 << 16  # number of elements; for larger weights oneDNN is faster
MOST = 4 << 30  # largest size of packed weights in bytes
BUILT = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and platform.machine().lower() in ("x86_64", "amd64")
)
# With AVX2 only (Zen 3), a thread reaches 103 GFLOP/s with MKL and 77 with oneDNN. With packed weights and
# a number of rows in `FEW`, oneDNN takes 0.6 to 1 times as long as MKL, which reaches half of the memory
# bandwidth.
FASTER = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
FEW = range(2, 49)
# Layers of transformers models that read the same input; their packed weights are concatenated.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PLAIN = (Tensor, nn.Parameter)  # types of weights that are not sharded
_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def onednn(model: nn.Module, *, pack: bool = False) -> Iterator[dict[int, Packed]]:
    """Compute the large linear layers of a model with oneDNN inside this context, forward and backward.

    Only layers with unsharded float32 weights on an x86 CPU are changed, outside of autocast. With `pack`, up
    to 4 GiB of weights are copied once into oneDNN's layout, for calls without gradient on few rows; these
    weights must not change inside the context. Yields a mapping from the id of a layer to its packed weights.
    """
    inside = there()
    groups = [group for group in _groups(model) if _fits(group)] if inside or pack and usable() else []
    packs: list[tuple[Sequence[nn.Linear], Packed]] = []
    if pack and sum(layer.weight.nbytes for group in groups for layer in group) <= MOST:
        packs = [(group, Packed(group)) for group in groups]
        forwards = [(m, partial(packed, i)) for group, packed in packs for i, m in enumerate(group)]
    else:
        alone = [m for group in groups for m in group if inside and _fits([m])]
        forwards = [(layer, partial(_unpacked, layer)) for layer in alone]
    for layer, forward in forwards:
        layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    token = _INSIDE.set(inside)
    try:
        yield {id(layer): packed for group, packed in packs for layer in group}
    finally:
        _INSIDE.reset(token)
        for layer, _ in forwards:
            del layer.forward


def packed_bytes(model: nn.Module) -> int:
    """Compute how many bytes of weights `onednn(model, pack=True)` copies; weights may be fake tensors."""
    groups = _groups(model, (*PLAIN, FakeTensor))
    layers = [layer for group in groups if usable() and _fits(group) for layer in group]
    size = sum(layer.weight.nbytes for layer in layers)
    return size if size <= MOST else 0


def _groups(model: nn.Module, kinds: tuple[type, ...] = PLAIN) -> Iterator[list[nn.Linear]]:
    """Yield the linear layers that pass `is_plain`, in groups of layers that read the same input."""
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
    # Exclude subclasses and layers with a replaced forward, which may compute something else.
    return type(layer) is nn.Linear and "forward" not in vars(layer) and _is_whole(layer.weight, kinds)


def is_replaced(module: nn.Module) -> bool:
    """Whether an open `onednn` context replaced the forward of a module."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and (isinstance(forward.func, Packed) or forward.func is _unpacked)


def side_by_side(
    layers: Sequence[nn.Linear], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights (m, n) and the biases (m,), if any, of layers that read the same input."""
    biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in layers]
    bias = torch.cat(biases).to(dtype) if any(x.bias is not None for x in layers) else None
    return torch.cat([x.weight.detach().to(dtype) for x in layers]), bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer with weight (m, n), possibly a slice of a larger weight, for x (..., n).

    Inside `onednn` this uses oneDNN, elsewhere torch.
    """
    if _INSIDE.get() and _is_whole(weight) and weight.numel() > MANY and _suits(x):
        return _Linear.apply(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def usable() -> bool:
    """Whether oneDNN is available for float32 weights."""
    return BUILT and torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu")


def there() -> bool:
    """Whether oneDNN is available and faster than MKL for unpacked float32 weights."""
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
    """Packed weights of layers that read the same input; the first call computes all their outputs."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        weight, self.bias = side_by_side(layers)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.read: tuple[Tensor | None, int] = None, 0  # last input and its write counter
        self.parts: dict[int, Tensor] = {}  # by layer: outputs for `read` until they are returned

    def __call__(self, number: int, x: Tensor) -> Tensor:
        """Compute the output of the layer with index `number`."""
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
        """Multiply x by the packed weights: outputs (..., m) of all layers, plus `other` (..., m) if any."""
        if other is None:
            return _multiply(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x (..., n) times the transpose of weight (m, n), plus bias, with oneDNN, without gradient."""
    # For a slice of columns, oneDNN falls back to reference code, which is a thousand times slower.
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
        grad = grad.contiguous()  # `grad` may be an expanded scalar
        for_x = times(grad, weight.t()) if ctx.needs_input_grad[0] else None  # (..., m) @ (m, n)
        rows, seen = grad.flatten(0, -2), x.flatten(0, -2)
        for_weight = times(rows.t(), seen.t()) if ctx.needs_input_grad[1] else None  # (m, r) @ (r, n)
        return for_x, for_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
