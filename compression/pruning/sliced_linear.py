"""Linear layers computed for a subset of their outputs or inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmrl.core import onednn

FeatureIndex = slice | Tensor | None  # which outputs or inputs; None: all


def feature_index(chosen: Sequence[int] | None, size: int = 1) -> FeatureIndex:
    """Return the indices of chosen units of `size` features each; a slice, without a copy, if contiguous."""
    if chosen is None:
        return None
    first, last = (chosen[0], chosen[-1]) if chosen else (0, -1)
    if list(chosen) == list(range(first, last + 1)):
        return slice(first * size, (last + 1) * size)
    units = torch.tensor(list(chosen))
    return (units[:, None] * size + torch.arange(size)).flatten()


def sliced_linear(
    linear: nn.Module, x: Tensor, *, rows: FeatureIndex = None, columns: FeatureIndex = None
) -> Tensor:
    """Compute some outputs (`rows` of the weight) from some inputs (`columns`); `x` has these inputs only.

    An unknown kind of layer computes all outputs, with zeros for the missing inputs.
    """
    if rows is None and columns is None:
        return linear(x)
    kind = type(linear)
    return SLICED.get(f"{kind.__module__}.{kind.__qualname__}", _whole)(linear, x, rows, columns)


def _take(weight: Tensor, axis: int, chosen: FeatureIndex) -> Tensor:
    if chosen is None:
        return weight
    if type(chosen) is slice:
        return weight.narrow(axis, chosen.start, chosen.stop - chosen.start)
    return weight.index_select(axis, chosen.to(weight.device))


def _plain(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    bias = linear.bias if linear.bias is None else _take(linear.bias, 0, rows)
    return onednn.linear(x, _take(_take(linear.weight, 0, rows), 1, columns), bias)


def _upcast(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    bias = linear.bias if linear.bias is None else _take(linear.bias, 0, rows).to(linear.compute)
    weight = _take(_take(linear.weight, 0, rows), 1, columns).to(linear.compute)
    return F.linear(x.to(linear.compute), weight, bias)


def _four_bits(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    """Compute a bitsandbytes 4-bit layer: dequantise the whole weight, as its own matmul does, then slice."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(linear.weight.data, linear.weight.quant_state).to(x.dtype)
    bias = linear.bias if linear.bias is None else _take(linear.bias, 0, rows).to(x.dtype)
    return F.linear(x, _take(_take(weight, 0, rows), 1, columns), bias)


def _adapted(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    """Compute a LoRA layer: y = W x + scaling * B A x, with W and B sliced by rows, W and A by columns."""
    out = sliced_linear(linear.base_layer, x, rows=rows, columns=columns)
    if linear.disable_adapters or linear.merged:
        return out
    for name in linear.active_adapters:
        if name in linear.lora_A:
            down, up = linear.lora_A[name], linear.lora_B[name]
            inner = sliced_linear(down, linear.lora_dropout[name](x.to(down.weight.dtype)), columns=columns)
            out = out + (sliced_linear(up, inner, rows=rows) * linear.scaling[name]).to(out.dtype)
    return out


def _whole(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    if columns is not None:
        index = torch.arange(linear.in_features, device=x.device)[columns]
        x = x.new_zeros(*x.shape[:-1], linear.in_features).index_copy(-1, index, x)
    out = linear(x)
    return out if rows is None else _take(out, -1, rows)


SLICED: dict[str, Callable[[nn.Module, Tensor, FeatureIndex, FeatureIndex], Tensor]] = {
    "torch.nn.modules.linear.Linear": _plain,
    "bitsandbytes.nn.modules.Linear4bit": _four_bits,
    "peft.tuners.lora.layer.Linear": _adapted,
    "peft.tuners.lora.bnb.Linear4bit": _adapted,
    "peft.tuners.lora.bnb.Linear8bitLt": _adapted,
    "mmrl.compression.fp32_linear.UpcastLinear": _upcast,
}


# ---- views of a model with shared weights but other computation, and the record of applied tran

RECORD = "mmrl_transforms"
# Transforms whose result is in the saved checkpoint itself, so that loading does not apply them again.
STORED = ("structured_pruning",)


def share_weights(module: nn.Module, swap: Mapping[int, nn.Module] | None = None) -> nn.Module:
    """Copy a tree of modules without copying tensors; `swap` maps the `id` of modules to replacements.

    Adapters that are added to the copy do not appear in the original, nor the other way round.
    """
    return _copy_tree(module, dict(swap or {}))


def _copy_tree(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    copied = copy.copy(module)
    known[id(module)] = copied
    state = vars(copied)
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        state[name] = copy.copy(state[name])
    # `copy.copy` carries hooks over by reference; a hook on the copy must not run in the original.
    for name in [name for name in state if name.endswith(("_hooks", "_hooks_with_kwargs"))]:
        state[name] = copy.copy(state[name])
    children = vars(module)["_modules"]
    state["_modules"] = {
        name: child if child is None else _copy_tree(child, known) for name, child in children.items()
    }
    for name in [name for name in state if type(state[name]) is BoundFunction]:
        state[name] = state[name].onto(known)
    return copied


class BoundFunction:
    """A partial function whose module arguments are replaced when its owner is copied.

    Works for `copy.deepcopy` and for `share_weights`.
    """

    def __init__(self, function: Callable, *first: Any, like: Callable | None = None) -> None:
        self.function, self.first = function, first
        if like is not None:  # `generate` reads the arguments of a method from its signature
            self.__signature__ = inspect.signature(like)

    def __call__(self, *rest: Any, **named: Any) -> Any:
        return self.function(*self.first, *rest, **named)

    def onto(self, known: Mapping[int, nn.Module]) -> BoundFunction:
        """Rebind the function to the copies of its modules, looked up by `id`."""
        moved = copy.copy(self)
        moved.first = tuple(known.get(id(arg), arg) for arg in self.first)
        return moved


def applied_transforms(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """List the transforms of a model as `{"name": ..., option: ...}`, in order of application."""
    return vars(model).get(RECORD, ())


def record_transform(model: nn.Module, before: nn.Module, name: str, options: Mapping[str, Any]) -> nn.Module:
    """Record on a view that a transform was applied to the model `before`; twice raises ValueError."""
    done = applied_transforms(before)
    if name in [entry["name"] for entry in done]:
        raise ValueError(
            f"the transform '{name}' was applied to this model already, with "
            f"{done_options(done, name)}; apply it once, with the options you want"
        )
    vars(model)[RECORD] = (*done, {"name": name, **options})
    return model


def done_options(done: tuple[dict[str, Any], ...], name: str) -> dict[str, Any]:
    """Return the options that a transform was applied with."""
    return next({k: v for k, v in entry.items() if k != "name"} for entry in done if entry["name"] == name)
