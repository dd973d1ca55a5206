"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: features of images and tiles, some with newlines."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mmrl.vision.models.family import Inputs, VLMFamily, linear, patches, per_image, split_images


def count_packed(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the packed media features of LLaVA-OneVision by running the model's packing on zeros."""
    config, counts = core.config, {}
    if "pixel_values" in inputs:
        # A feature width of 1 is enough, because only lengths are used.
        tiles = [torch.zeros(tiles.shape[0], patches(config), 1) for tiles in inputs["pixel_values"]]
        _, lengths = core.pack_image_features(
            tiles,
            inputs["image_sizes"],
            image_newline=torch.zeros(1),
            vision_aspect_ratio=config.vision_aspect_ratio,
        )
        counts[config.image_token_id] = int(torch.as_tensor(lengths).sum())
    if "pixel_values_videos" in inputs:
        videos, frames = inputs["pixel_values_videos"].shape[:2]
        # Bilinear pooling halves the sides, rounded up; one newline token ends every video.
        side = math.ceil(math.isqrt(patches(config)) / 2)
        counts[config.video_token_id] = videos * (frames * side**2 + 1)
    return counts


def count_tiles(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the image features of LLaVA-NeXT: the image, its tiles without padding, and newlines.

    The packing of the model runs on zeros of width 1, because only lengths are used.
    """
    if "pixel_values" not in inputs:
        return {}
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    model: Any = core
    config, sizes = model.config, inputs["image_sizes"]
    side, grids = config.vision_config.image_size, config.image_grid_pinpoints
    # The size of an image determines its number of tiles; further tiles in `pixel_values` are padding.
    tiles = [torch.zeros(image_size_to_num_patches(size, grids, side), patches(config), 1) for size in sizes]
    _, lengths = model.pack_image_features(
        tiles, sizes, config.vision_feature_select_strategy, image_newline=torch.zeros(1)
    )
    return {config.image_token_id: int(lengths.sum())}


FAMILIES = {
    # Feature counts: one per patch, and one for the class token if it is used.
    "llava": VLMFamily(
        linear,
        per_image(lambda c: patches(c) + (c.vision_feature_select_strategy == "full")),
        split_images,
    ),
    "llava_next": VLMFamily(linear, count_tiles, split_images),
    "llava_onevision": VLMFamily(linear, count_packed),
}
