"""Model adapters of Qwen-VL, InternVL and SmolVLM, and the look-up of an adapter by `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.adapter import (
    ModelAdapter,
    PatchGrids,
    multimodal_positions,
    project,
    sequence_positions,
)
from mmrl.compression.model_adapters.llava import TEXT, llava, llava_onevision

# Qwen2-VL and Qwen2.5-VL: grids of merged patches, and positions with three axes (M-RoPE).


def grids(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    """Return the grid of merged patches of every image and of every temporal patch of a video."""
    merge, out = core.config.vision_config.spatial_merge_size, {}
    for kind in ("image", "video"):
        grid = inputs.get(f"{kind}_grid_thw")
        if grid is not None:
            out[getattr(core.config, f"{kind}_token_id")] = [
                (h // merge, w // merge) for frames, h, w in grid.tolist() for _ in range(frames)
            ]
    return out


QWEN_VL = ModelAdapter(grids, project, multimodal_positions, noted=True)


def qwen_vl(core: nn.Module) -> ModelAdapter:
    """Return the adapter of Qwen2-VL and Qwen2.5-VL."""
    return QWEN_VL


# InternVL and SmolVLM: every tile is one square patch grid.


def _internvl(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    return _squares(core, inputs, round(core.config.image_seq_length**0.5))


def _smolvlm(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    vision = core.config.vision_config
    return _squares(core, inputs, vision.image_size // vision.patch_size // core.config.scale_factor)


def _squares(core: nn.Module, inputs: Mapping[str, Any], side: int) -> dict[int, PatchGrids]:
    token = core.config.image_token_id
    return {token: [(side, side)] * (int((inputs["input_ids"] == token).sum()) // (side * side))}


def internvl(core: nn.Module) -> ModelAdapter:
    """Return the adapter of InternVL for its language model."""
    return replace(
        ModelAdapter(_internvl, project, sequence_positions),
        project=TEXT[core.config.get_text_config().model_type],
    )


def smolvlm(core: nn.Module) -> ModelAdapter:
    """Return the adapter of SmolVLM for its language model."""
    return replace(
        ModelAdapter(_smolvlm, project, sequence_positions),
        project=TEXT[core.config.get_text_config().model_type],
    )


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
