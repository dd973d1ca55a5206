"""Kimi-K2.5: Qwen's patch grids, positions 0, 1, 2, ..., and no videos."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from mmrl.vision.models.families.qwen_vl import split_grids
from mmrl.vision.models.family import Inputs, VLMFamily, linear


def count(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the image features: one per square of patches.

    Raises ValueError for videos: transformers 5.23 averages the frames of a chunk, but then splits the
    features as if it had not.
    """
    config: Any = core.config
    if "video_grid_thw" in inputs:
        raise ValueError(
            f"videos cannot be read with models of type '{config.model_type}', of which the forward "
            "pass in transformers 5.23 fails; give their frames as images"
        )
    if "image_grid_thw" not in inputs:
        return {}
    merged = math.prod(config.vision_config.merge_kernel_size)
    return {config.image_token_id: int((inputs["image_grid_thw"].prod(-1) // merged).sum())}


def cast(core: nn.Module, media: Inputs) -> dict[str, Tensor]:
    """Convert pixels to the dtype of the vision tower, which does not convert them."""
    tower: Any = core.vision_tower
    return {name: x.to(tower.dtype) if x.is_floating_point() else x for name, x in media.items()}


FAMILIES = {"kimi_k25": VLMFamily(linear, count, split_grids, assemble=cast)}
