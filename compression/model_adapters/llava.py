"""Adapters of LLaVA and LLaVA-OneVision, whose vision tower has a square patch grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmrl.compression.model_adapters.adapter import (
    ModelAdapter,
    PatchGrids,
    project,
    project_normed,
    sequence_positions,
)


def _llava_grids(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    """Return the patch grid of every image; a class token that is kept is a grid of one cell."""
    config = core.config
    if inputs.get("image_sizes") is not None:
        sizes = torch.as_tensor(inputs["image_sizes"]) // config.vision_config.patch_size
        return {config.image_token_id: [tuple(size) for size in sizes.tolist()]}
    side = config.vision_config.image_size // config.vision_config.patch_size
    extra = [(1, 1)] if config.vision_feature_select_strategy == "full" else []
    count = int((inputs["input_ids"] == config.image_token_id).sum())
    return {config.image_token_id: [*extra, (side, side)] * (count // (side * side + len(extra)))}


def _onevision_grids(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    """Return a grid of the whole image and one of its joined tiles; videos are pooled to half the side.

    The last column of the tiles' grid holds the newline features; a video ends with a grid of one cell.
    """
    config, grids = core.config, {}
    side = config.vision_config.image_size // config.vision_config.patch_size
    if inputs.get("pixel_values") is not None:
        sizes = torch.as_tensor(inputs["image_sizes"]).tolist()
        numbers = inputs.get("batch_num_images")
        numbers = [1] * len(sizes) if numbers is None else numbers.tolist()
        # The processor splits an image into tiles only if it is the only image of its prompt.
        alone = [number == 1 for number in numbers for _ in range(number)]
        grids[config.image_token_id] = [
            grid
            for size, cut in zip(sizes, alone, strict=True)
            for grid in _image_grids(core, side, size, cut)
        ]
    if inputs.get("pixel_values_videos") is not None:
        grids[config.video_token_id] = _video_grids(side, *inputs["pixel_values_videos"].shape[:2])
    encoded = (inputs.get("mm_encoder_outputs") or {}).get("video")
    if encoded is not None:
        videos, tokens = encoded.pooler_output.shape[:2]
        grids[config.video_token_id] = _video_grids(side, videos, (tokens - 1) // (-(-side // 2)) ** 2)
    return grids


def _video_grids(side: int, videos: int, frames: int) -> PatchGrids:
    half = -(-side // 2)
    return ([(half, half)] * frames + [(1, 1)]) * videos


def _image_grids(core: nn.Module, side: int, size: list[int], cut: bool) -> PatchGrids:
    """Return the grids of an image of `size` (height, width).

    Packs zero features with newline features of 1 by the model's own function, then finds the first newline,
    which ends the first row of the joined tiles.
    """
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    config = core.config
    if not cut:
        return [(side, side), (1, 1)]
    tiles = image_size_to_num_patches(
        image_size=size,
        grid_pinpoints=config.image_grid_pinpoints,
        patch_size=config.vision_config.image_size,
    )
    packed, _ = core.pack_image_features(
        [torch.zeros(tiles, side * side, 1)],
        torch.tensor([size]),
        image_newline=torch.ones(1),
        vision_aspect_ratio=config.vision_aspect_ratio,
    )
    rest = packed[0][side * side :, 0]
    columns = int(rest.nonzero()[0]) + 1 if len(rest) else 1
    return [(side, side), (len(rest) // columns, columns)]


def _tower_layer(core: nn.Module) -> nn.Module:
    """Return the attention of the second-last tower layer, which VisionZip ranks patches by."""
    return core.vision_tower.encoder.layers[-2].self_attn


LLAVA = ModelAdapter(_llava_grids, project, sequence_positions, _tower_layer)
ONEVISION = ModelAdapter(_onevision_grids, project, sequence_positions, noted=True)
TEXT = {"llama": project, "qwen2": project, "mistral": project, "qwen3": project_normed}


def llava(core: nn.Module) -> ModelAdapter:
    """Return the adapter of LLaVA for its language model."""
    return replace(LLAVA, project=TEXT[core.config.get_text_config().model_type])


def llava_onevision(core: nn.Module) -> ModelAdapter:
    """Return the adapter of LLaVA-OneVision for its language model."""
    return replace(ONEVISION, project=TEXT[core.config.get_text_config().model_type])
