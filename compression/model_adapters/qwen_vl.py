"""Adapter of Qwen2-VL and Qwen2.5-VL: grids of merged patches and M-RoPE positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.adapter import ModelAdapter, PatchGrids, multimodal_positions, project


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
