"""LLaVA, LLaVA-OneVision: features of a square tower in reading order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmrl.compression.model_adapters.adapter import Decoder, Rasters, in_line, project, project_normed


def _patches(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, Rasters]:
    """A raster of patches for every picture; a class token, where it is kept, is a raster of one cell."""
    config = core.config
    if inputs.get("image_sizes") is not None:
        sizes = torch.as_tensor(inputs["image_sizes"]) // config.vision_config.patch_size
        return {config.image_token_id: [tuple(size) for size in sizes.tolist()]}
    side = config.vision_config.image_size // config.vision_config.patch_size
    extra = [(1, 1)] if config.vision_feature_select_strategy == "full" else []
    found = int((inputs["input_ids"] == config.image_token_id).sum())
    return {config.image_token_id: [*extra, (side, side)] * (found // (side * side + len(extra)))}


def _packed(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, Rasters]:
    """A raster for the whole picture and one for its tiles, laid side by side, whose last column is the line
    break; clips are pooled to half the side, and end with one cell."""
    config, found = core.config, {}
    side = config.vision_config.image_size // config.vision_config.patch_size
    if inputs.get("pixel_values") is not None:
        sizes = torch.as_tensor(inputs["image_sizes"]).tolist()
        numbers = inputs.get("batch_num_images")
        numbers = [1] * len(sizes) if numbers is None else numbers.tolist()
        # Only the picture of a prompt that has no other is cut into tiles.
        alone = [number == 1 for number in numbers for _ in range(number)]
        found[config.image_token_id] = [
            one for size, cut in zip(sizes, alone, strict=True) for one in _tiled(core, side, size, cut)
        ]
    if inputs.get("pixel_values_videos") is not None:
        found[config.video_token_id] = _clips(side, *inputs["pixel_values_videos"].shape[:2])
    encoded = (inputs.get("mm_encoder_outputs") or {}).get("video")
    if encoded is not None:
        clips, tokens = encoded.pooler_output.shape[:2]
        found[config.video_token_id] = _clips(side, clips, (tokens - 1) // (-(-side // 2)) ** 2)
    return found


def _clips(side: int, clips: int, frames: int) -> Rasters:
    half = -(-side // 2)
    return ([(half, half)] * frames + [(1, 1)]) * clips


def _tiled(core: nn.Module, side: int, size: list[int], cut: bool) -> Rasters:
    """Find the rasters of a picture of `size`, from the model's own packing of empty features with breaks of
    1."""
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
    """The attention whose class token ranks patches: of the second layer from the end."""
    return core.vision_tower.encoder.layers[-2].self_attn


LLAVA = Decoder(_patches, project, in_line, _tower_layer)
PACKED = Decoder(_packed, project, in_line, noted=True)
TEXT = {"llama": project, "qwen2": project, "mistral": project, "qwen3": project_normed}


def llava(core: nn.Module) -> Decoder:
    """LLaVA over any of its language models."""
    return replace(LLAVA, project=TEXT[core.config.get_text_config().model_type])


def llava_onevision(core: nn.Module) -> Decoder:
    """LLaVA-OneVision over any of its language models."""
    return replace(PACKED, project=TEXT[core.config.get_text_config().model_type])
