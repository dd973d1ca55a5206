"""Qwen2-VL and Qwen2.5-VL: rasters of merged patches, three axes of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.adapter import Decoder, Rasters, on_axes, project


def rasters(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, Rasters]:
    """A raster for every picture and every frame of a clip."""
    merge, found = core.config.vision_config.spatial_merge_size, {}
    for kind in ("image", "video"):
        grid = inputs.get(f"{kind}_grid_thw")
        if grid is not None:
            found[getattr(core.config, f"{kind}_token_id")] = [
                (h // merge, w // merge) for frames, h, w in grid.tolist() for _ in range(frames)
            ]
    return found


QWEN_VL = Decoder(rasters, project, on_axes, noted=True)


def qwen_vl(core: nn.Module) -> Decoder:
    """Qwen2-VL and Qwen2.5-VL."""
    return QWEN_VL
