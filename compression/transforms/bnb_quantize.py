"""Weights in 4 or 8 bits, through bitsandbytes."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from mmrl.compression.pruning.spec import core_of
from mmrl.compression.pruning.weight_views import note, share
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import transform

ADAPTER = "lora_"  # in the names of an adapter's own layers


@transform(packages={"bitsandbytes": "lowbit"})
def bnb_quantize(
    model: nn.Module,
    *,
    nbits: Literal[4, 8] = 4,
    kind: Literal["nf4", "fp4"] = "nf4",
    double: bool = True,
    threshold: NonNegativeFloat = 6.0,
) -> nn.Module:
    """Hold the linear layers of the language model in 4 or 8 bits; they no longer learn, an adapter over them
    does, whether it was there before or comes later.

    4 bits: numbers of `kind` in blocks of 64 with one scale each, which `double` quantizes again. 8 bits: one
    scale for every output; inputs above `threshold` are multiplied in full. QLoRA (arXiv 2305.14314),
    LLM.int8 (arXiv 2208.07339), by bitsandbytes.
    """
    bnb = _bitsandbytes()
    layers = core_of(model).get_decoder().layers
    # What an adapter adds is small and learns; only what it stands on is held in few bits.
    linear = [m for name, m in layers.named_modules() if type(m) is nn.Linear and ADAPTER not in name]
    if not linear:
        raise ValueError(
            f"no plain linear layer to hold in {nbits} bits; apply `bnb_quantize` before adapters and "
            "`layer_cast`"
        )
    if nbits == 4:
        swap = {id(m): _four(bnb, m, kind, double) for m in linear}
    elif nbits == 8:
        swap = {id(m): _eight(bnb, m, threshold) for m in linear}
    else:
        raise ValueError(f"weights can be held in 4 or 8 bits, not in {nbits}")
    view = share(model, swap)
    # peft asks the model which of its layers to use.
    vars(view)[f"is_loaded_in_{nbits}bit"] = True
    options = {"nbits": nbits, "kind": kind, "double": double, "threshold": threshold}
    return note(view, model, "bnb_quantize", options)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError("`bnb_quantize` needs bitsandbytes: pip install 'mmrl[lowbit]'") from error
    return bitsandbytes


def _four(bnb: Any, linear: nn.Linear, kind: str, double: bool) -> nn.Module:
    out = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None,
        compute_dtype=linear.weight.dtype, compress_statistics=double, quant_type=kind, device="meta",
    )  # fmt: skip
    out.weight = bnb.nn.Params4bit(
        linear.weight.detach().clone(),
        requires_grad=False,
        compress_statistics=double,
        quant_type=kind,
        module=out,
    )
    # Its fast path on the CPU packs weights anew at the first call without gradients: it computes in bfloat16
    # whatever was asked for, and what is packed cannot be learned through.
    out.support_avx512bf16_for_cpu = False
    return _placed(out, linear)


def _eight(bnb: Any, linear: nn.Linear, threshold: float) -> nn.Module:
    out = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, linear.bias is not None,
        has_fp16_weights=False, threshold=threshold, device="meta",
    )  # fmt: skip
    out.weight = bnb.nn.Int8Params(
        linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False
    )
    return _placed(out, linear)


def _placed(out: nn.Module, linear: nn.Linear) -> nn.Module:
    """Take the bias over, and quantize, which bitsandbytes does when a layer is sent to its device."""
    if linear.bias is not None:
        out.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return out.to(linear.weight.device).train(linear.training)
