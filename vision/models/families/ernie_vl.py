"""Ernie 4.5-VL: Qwen's patch grids, merged pairs of video frames, and experts for images and videos."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mmrl.vision.models.families.qwen_vl import count_grids, mrope, split_grids
from mmrl.vision.models.family import Inputs, VLMFamily


def positions(core: nn.Module, inputs: Inputs) -> Tensor:
    config: Any = core.config
    return mrope(core, inputs, steps=config.vision_config.temporal_merge_size)


def _count(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count media features by token id; the model merges squares of patches, and pairs of video frames."""
    counts, config = count_grids(core, inputs), cast(Any, core.config)
    steps = {config.video_token_id: config.vision_config.temporal_merge_size}
    return {token: count // steps.get(token, 1) for token, count in counts.items()}


def _experts(config: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return token types for the experts: 0 text, 1 image, 2 video, each with its start and end tokens."""
    types = torch.zeros_like(ids)
    for number, kind in enumerate(("image", "video"), 1):
        names = (f"{kind}_token_id", f"{kind}_start_token_id", f"{kind}_end_token_id")
        types[torch.isin(ids, ids.new_tensor([getattr(config, name) for name in names]))] = number
    return {"moe_mm_token_type_ids": types}


FAMILIES = {"ernie4_5_vl_moe": VLMFamily(positions, _count, split_grids, experts=_experts)}
