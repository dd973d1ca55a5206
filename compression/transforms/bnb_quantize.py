"""Weight quantisation to 4 or 8 bits with bitsandbytes."""

from __future__ import annotations

from typing import Literal

from torch import nn

from mmrl.compression.pruning.prune import share_weights
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import transform
from mmrl.runtime.low_bit import quantize_into
from mmrl.runtime.modules import record_transform

ADAPTER = "lora_"  # part of the names of all layers of a LoRA adapter


@transform(packages={"bitsandbytes": "lowbit"})
def bnb_quantize(
    model: nn.Module,
    *,
    nbits: Literal[4, 8] = 4,
    kind: Literal["nf4", "fp4"] = "nf4",
    double: bool = True,
    threshold: NonNegativeFloat = 6.0,
) -> nn.Module:
    """Quantise the linear layers of the language model to 4 or 8 bits with bitsandbytes.

    The quantised weights are frozen. A LoRA adapter, added before or after the quantisation, remains
    trainable. 4 bits: QLoRA (arXiv 2305.14314) with one scale per block of 64 weights. 8 bits: LLM.int8
    (arXiv 2208.07339) with one scale per output feature.

    Args:
        nbits: Bits per weight, 4 or 8.
        kind: Number format of 4-bit weights: `nf4` (QLoRA's NormalFloat) or `fp4`.
        double: Whether to quantise the scales of 4-bit blocks, too (QLoRA's double quantisation).
        threshold: Input features with a larger magnitude are multiplied in 16 bits; 8 bits only (paper: 6.0).

    Raises: ValueError: If the language model has no plain linear layer left to quantise.
    """
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise ImportError("`bnb_quantize` needs bitsandbytes: pip install 'mmrl[lowbit]'") from error

    def quantised(linear: nn.Linear) -> nn.Module:
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        weight = linear.weight.detach().clone()
        if nbits == 4:
            form = {"compress_statistics": double, "quant_type": kind}
            out = bnb.nn.Linear4bit(*sizes, compute_dtype=weight.dtype, device="meta", **form)
            # The CPU fast path repacks the weights in the first call without gradients. It then computes in
            # bfloat16 regardless of `compute_dtype`, and no gradient flows through packed weights.
            out.support_avx512bf16_for_cpu = False
        else:
            out = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=threshold, device="meta")
        if linear.bias is not None:
            out.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        return quantize_into(out, weight).train(linear.training)

    layers = model.base_model.get_decoder().layers
    # LoRA matrices are small and trainable, so quantise only the base layers.
    linear = [m for name, m in layers.named_modules() if type(m) is nn.Linear and ADAPTER not in name]
    if not linear:
        raise ValueError(
            f"no plain linear layer to quantise to {nbits} bits; apply `bnb_quantize` before adapters and "
            "`layer_cast`"
        )
    view = share_weights(model, {id(m): quantised(m) for m in linear})
    # peft reads this flag to choose the adapter class for quantised layers.
    vars(view)[f"is_loaded_in_{nbits}bit"] = True
    options = {"nbits": nbits, "kind": kind, "double": double, "threshold": threshold}
    return record_transform(view, model, "bnb_quantize", options)
