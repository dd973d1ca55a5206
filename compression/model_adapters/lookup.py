"""From a model to its family, by `model_type`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mmrl.compression.model_adapters.adapter import Decoder
from mmrl.compression.model_adapters.llava import llava, llava_onevision
from mmrl.compression.model_adapters.qwen_vl import qwen_vl
from mmrl.compression.model_adapters.tiles import internvl, smolvlm

DECODERS: dict[str, Callable[[nn.Module], Decoder]] = {
    "llava": llava,
    "llava_onevision": llava_onevision,
    "qwen2_vl": qwen_vl,
    "qwen2_5_vl": qwen_vl,
    "internvl": internvl,
    "smolvlm": smolvlm,
}


def decoder_of(core: nn.Module) -> Decoder:
    """Find the family of a model, given without its head."""
    kind = core.config.model_type
    if kind not in DECODERS:
        raise ValueError(
            f"no adapter for models of type '{kind}'; visual computation can be pruned in "
            f"{', '.join(sorted(DECODERS))}"
        )
    try:
        found = DECODERS[kind](core)
    except KeyError as error:
        raise ValueError(
            f"no adapter for '{kind}' over a language model of type {error}; add one in compression/decoders"
        ) from error
    text = core.config.get_text_config()
    window = "full_attention" if getattr(text, "sliding_window", None) is None else "sliding_attention"
    windows = set(getattr(text, "layer_types", None) or [window]) - {"full_attention"}
    if windows:
        raise ValueError(f"layers of type {sorted(windows)} cannot be pruned; only full attention can")
    return found
