"""Quantised weights of bitsandbytes layers and their scales, also for fake tensors (shapes only)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mmrl.runtime.modules import placement


def quantized_linear(
    linear: nn.Linear, nbits: int, *, kind: str = "nf4", double: bool = True, threshold: float = 6.0
) -> nn.Module:
    """Convert a linear layer to a bitsandbytes layer of 4 or 8 bits; the bias is not quantised.

    `kind` (number format) and `double` (double quantisation) are for 4 bits; `threshold` is for 8 bits.
    """
    import bitsandbytes as bnb

    sizes = linear.in_features, linear.out_features, linear.bias is not None
    weight = linear.weight.detach().clone()
    if nbits == 4:
        form = {"compress_statistics": double, "quant_type": kind}
        out = bnb.nn.Linear4bit(*sizes, compute_dtype=weight.dtype, device="meta", **form)
        # Disable the CPU fast path: its first call without gradients repacks the weights. After that it
        # ignores `compute_dtype` (it uses bfloat16), and no gradient flows through the layer.
        out.support_avx512bf16_for_cpu = False
    else:
        out = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=threshold, device="meta")
    if linear.bias is not None:
        out.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return quantize_into(out, weight).train(linear.training)


def quantize_blocks(model: Any, nbits: int) -> Any:
    """Quantise the linear layers in the blocks of a transformers model to 4 or 8 bits, in place.

    Embeddings, layers outside of blocks, and modules that transformers keeps in float32 stay as they are.
    """
    exact = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    blocks = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    for name, layer in dict(model.named_modules()).items():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if inside and type(layer) is nn.Linear and not exact & set(name.split(".")):
            model.set_submodule(name, quantized_linear(layer, nbits))
    return model


def quantize_into(layer: Any, weight: Tensor) -> nn.Module:
    """Quantise a weight with the settings of a bitsandbytes linear layer, and store it in the layer.

    The layer is moved to the device of `loading_onto`, where a model from main memory then takes only the
    memory of its codes. A fake tensor is quantised to fake codes and scales.
    """
    if isinstance(weight, FakeTensor):
        layer.weight = _shapes(layer, weight)
        return layer
    layer.weight = type(layer.weight)(weight, requires_grad=False, **vars(layer.weight))
    return layer.to(
        placement().device or weight.device
    )  # bitsandbytes quantises when a layer is moved to its device


def _shapes(layer: Any, weight: Tensor) -> nn.Parameter:
    """Quantise a fake tensor; return its codes as a parameter with the scales as attributes.

    The parameter is an `nn.Parameter`, since fake tensors cannot be of the classes of bitsandbytes.
    """
    from bitsandbytes import functional
    from bitsandbytes.nn.modules import Linear4bit

    settings = vars(layer.weight)
    if isinstance(layer, Linear4bit):
        names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
        codes, state = functional.quantize_4bit(weight, **{name: settings[name] for name in names})
        attributes = {"quant_state": state, "bnb_quantized": True}
    else:
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        attributes = {"CB": codes, "SCB": scales}
        layer.state.threshold = 0.0  # no outlier detection: fake tensors have no values
    parameter = nn.Parameter(codes, requires_grad=False)
    vars(parameter).update(settings | attributes)
    return parameter


def quantize_as_checkpoint(model: nn.Module, settings: Any) -> None:
    """Quantise the linear layers of a model with fake weights, as loading a quantised checkpoint does.

    Args:
        model: A transformers model in full precision.
        settings: The `quantization_config` of the checkpoint.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    plain: dict[str, Any] = dict(model.named_modules())
    quantizer = AutoHfQuantizer.from_config(settings)
    quantizer.preprocess_model(model, device_map=None)
    for name, layer in model.named_modules():
        if layer is not plain[name]:
            quantize_into(layer, plain[name].weight.detach())
            layer.bias = plain[name].bias
    quantizer.postprocess_model(model)


def scales_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the scales of quantised weights, which are neither parameters nor buffers."""
    for part in module.modules():
        for owner in (*part.parameters(recurse=False), getattr(part, "state", None)):
            state = getattr(owner, "quant_state", None)
            while state is not None:  # 4-bit scales can be quantised themselves
                yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
                state = state.state2
            scales = getattr(owner, "SCB", None)  # 8-bit scales (moved to the layer by its first call)
            if isinstance(scales, torch.Tensor):
                yield scales
