"""Linear layers computed for a subset of their outputs or inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mmrl.core import onednn

FeatureIndex = slice | Tensor | None  # selected outputs or inputs; None: all


def feature_index(chosen: Sequence[int] | None, size: int = 1) -> FeatureIndex:
    """Return the feature indices of units of `size` features each; a slice (no copies) if contiguous."""
    if chosen is None:
        return None
    first, last = (chosen[0], chosen[-1]) if chosen else (0, -1)  # no units: the empty slice
    if list(chosen) == list(range(first, last + 1)):
        return slice(first * size, (last + 1) * size)
    units = torch.tensor(list(chosen))  # feature indices (units, size), unit by unit
    return (units[:, None] * size + torch.arange(size)).flatten()


def take(x: Tensor, axis: int, chosen: FeatureIndex) -> Tensor:
    """Select features along an axis of a tensor; contiguous features are not copied."""
    match chosen:
        case None:
            return x
        case slice():
            return x.narrow(axis, chosen.start, chosen.stop - chosen.start)
    return x.index_select(axis, chosen.to(x.device))


def sliced_linear(
    linear: nn.Module, x: Tensor, *, rows: FeatureIndex = None, columns: FeatureIndex = None
) -> Tensor:
    """Compute the outputs `rows` of a linear layer from the inputs `columns`; `x` has only these inputs.

    Layers of an unknown type compute all outputs, with zeros for the missing inputs.
    """
    if rows is None and columns is None:
        return linear(x)
    kind = type(linear)
    return SLICED.get(f"{kind.__module__}.{kind.__qualname__}", _whole)(linear, x, rows, columns)


def _plain(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    bias = linear.bias if linear.bias is None else take(linear.bias, 0, rows)
    return onednn.linear(x, take(take(linear.weight, 0, rows), 1, columns), bias)


def _upcast(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    bias = linear.bias if linear.bias is None else take(linear.bias, 0, rows).to(linear.compute)
    weight = take(take(linear.weight, 0, rows), 1, columns).to(linear.compute)
    return nn.functional.linear(x.to(linear.compute), weight, bias)


def _four_bits(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    """Compute a bitsandbytes 4-bit layer: dequantise the whole weight, as its own matmul does, then slice."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(linear.weight.data, linear.weight.quant_state).to(x.dtype)
    bias = linear.bias if linear.bias is None else take(linear.bias, 0, rows).to(x.dtype)
    return nn.functional.linear(x, take(take(weight, 0, rows), 1, columns), bias)


def _adapted(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    """Compute a LoRA layer: y = W x + scaling * B A x, with W and B sliced by rows, W and A by columns."""
    if linear.lora_variant:  # DoRA and similar variants scale whole rows of W
        return _whole(linear, x, rows, columns)
    out = sliced_linear(linear.base_layer, x, rows=rows, columns=columns)
    if linear.disable_adapters or linear.merged:  # a merged adapter is in the base weight
        return out
    for name in linear.active_adapters:
        if name in linear.lora_A:  # an active adapter may have no matrices for this layer
            down, up = linear.lora_A[name], linear.lora_B[name]
            inner = sliced_linear(down, linear.lora_dropout[name](x.to(down.weight.dtype)), columns=columns)
            out = out + (sliced_linear(up, inner, rows=rows) * linear.scaling[name]).to(out.dtype)
    return out


def _whole(linear: nn.Module, x: Tensor, rows: FeatureIndex, columns: FeatureIndex) -> Tensor:
    if columns is not None:
        index = torch.arange(linear.in_features, device=x.device)[columns]
        x = x.new_zeros(*x.shape[:-1], linear.in_features).index_copy(-1, index, x)
    return take(linear(x), -1, rows)


# Keyed by class name, so that bitsandbytes and peft are imported only for models that use them.
SLICED: dict[str, Callable[[nn.Module, Tensor, FeatureIndex, FeatureIndex], Tensor]] = {
    "torch.nn.modules.linear.Linear": _plain,
    "bitsandbytes.nn.modules.Linear4bit": _four_bits,
    "peft.tuners.lora.layer.Linear": _adapted,
    "peft.tuners.lora.bnb.Linear4bit": _adapted,
    "peft.tuners.lora.bnb.Linear8bitLt": _adapted,
    "mmrl.compression.fp32_linear.UpcastLinear": _upcast,
}
