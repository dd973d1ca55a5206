"""Look-up of the model adapter of a model by its `model_type`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mmrl.compression.model_adapters.adapter import ModelAdapter
from mmrl.compression.model_adapters.llava import llava, llava_onevision
from mmrl.compression.model_adapters.qwen_vl import qwen_vl
from mmrl.compression.model_adapters.tiles import internvl, smolvlm

ADAPTERS: dict[str, Callable[[nn.Module], ModelAdapter]] = {
    "llava": llava,
    "llava_onevision": llava_onevision,
    "qwen2_vl": qwen_vl,
    "qwen2_5_vl": qwen_vl,
    "internvl": internvl,
    "smolvlm": smolvlm,
}


def adapter_of(core: nn.Module) -> ModelAdapter:
    """Return the adapter of a model without its head; a ValueError names the supported families."""
    kind = core.config.model_type
    if kind not in ADAPTERS:
        raise ValueError(
            f"no adapter for models of type '{kind}'; visual computation can be pruned in "
            f"{', '.join(sorted(ADAPTERS))}"
        )
    try:
        adapter = ADAPTERS[kind](core)
    except KeyError as error:
        raise ValueError(
            f"no adapter for '{kind}' over a language model of type {error}; "
            "add one in compression/model_adapters"
        ) from error
    text = core.config.get_text_config()
    window = "full_attention" if getattr(text, "sliding_window", None) is None else "sliding_attention"
    windows = set(getattr(text, "layer_types", None) or [window]) - {"full_attention"}
    if windows:
        raise ValueError(f"layers of type {sorted(windows)} cannot be pruned; only full attention can")
    return adapter
