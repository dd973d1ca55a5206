"""Weight quantisation to 4 or 8 bits with bitsandbytes."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from mmrl.compression.pruning.prune import share_weights
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import transform
from mmrl.runtime.low_bit import quantized_linear
from mmrl.runtime.modules import record_transform

ADAPTER = "lora_"  # part of the names of all layers of a LoRA adapter


def blocks_of(model: Any) -> list[tuple[str, nn.Module]]:
    """List (name, module) for all modules in the blocks of a language model or a diffusers network.

    Modules that diffusers keeps in float32 are left out.
    """
    if hasattr(model, "get_decoder"):  # every model of transformers has it
        return [*model.base_model.get_decoder().layers.named_modules()]
    exact = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    lists = [(name, part) for name, part in model.named_children() if isinstance(part, nn.ModuleList)]
    modules = [one for name, part in lists for one in part.named_modules(prefix=name)]
    return [(name, module) for name, module in modules if not exact & set(name.split("."))]


@transform(packages={"bitsandbytes": "lowbit"}, trains=False)
def bnb_quantize(
    model: nn.Module,
    *,
    nbits: Literal[4, 8] = 4,
    kind: Literal["nf4", "fp4"] = "nf4",
    double: bool = True,
    threshold: NonNegativeFloat = 6.0,
) -> nn.Module:
    """Quantise the linear layers of a language model or diffusion transformer to 4 or 8 bits.

    The layers in the blocks are quantised, with bitsandbytes; embeddings and output layers are not. The
    quantised weights are frozen. A LoRA adapter, added before or after the quantisation, remains
    trainable. 4 bits: QLoRA (arXiv 2305.14314) with one scale per block of 64 weights. 8 bits: LLM.int8
    (arXiv 2208.07339) with one scale per output feature.

    Args:
        nbits: Bits per weight, 4 or 8.
        kind: Number format of 4-bit weights: `nf4` (QLoRA's NormalFloat) or `fp4`.
        double: Whether to quantise the scales of 4-bit blocks, too (QLoRA's double quantisation).
        threshold: With 8 bits, input features of a larger magnitude are multiplied in 16 bits (paper: 6.0).

    Raises `ValueError` if the model has no plain linear layer left to quantise.
    """
    # LoRA matrices are small and trainable, so quantise only the base layers.
    linear = [m for name, m in blocks_of(model) if type(m) is nn.Linear and ADAPTER not in name]
    if not linear:
        raise ValueError(
            f"no plain linear layer to quantise to {nbits} bits; apply `bnb_quantize` before adapters and "
            "`layer_cast`"
        )
    form = {"kind": kind, "double": double, "threshold": threshold}
    view = share_weights(model, {id(m): quantized_linear(m, nbits, **form) for m in linear})
    # peft reads this flag to choose the adapter class for quantised layers.
    vars(view)[f"is_loaded_in_{nbits}bit"] = True
    return record_transform(view, model, "bnb_quantize", {"nbits": nbits, **form})
