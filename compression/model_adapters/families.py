"""Model families whose visual computation can be pruned, and the selection of their adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmrl.compression.model_adapters.adapter import ModelAdapter, PatchGrids
from mmrl.kv_cache.hf_cache import attention_types


def _squares(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    """Return the grids of models with one square grid per image or tile; a class token is a 1 x 1 grid."""
    config, vision = core.config, core.config.vision_config
    match config.model_type:
        case "internvl":
            image = [(round(config.image_seq_length**0.5),) * 2]
        case "smolvlm":
            image = [(vision.image_size // vision.patch_size // config.scale_factor,) * 2]
        case _:
            if inputs.get("image_sizes") is not None:
                sizes = torch.as_tensor(inputs["image_sizes"]) // vision.patch_size  # Pixtral: any image size
                return {config.image_token_id: [tuple(size) for size in sizes.tolist()]}
            image = [(1, 1)] if config.vision_feature_select_strategy == "full" else []
            image.append((vision.image_size // vision.patch_size,) * 2)
    count = int((inputs["input_ids"] == config.image_token_id).sum())
    return {config.image_token_id: image * (count // sum(h * w for h, w in image))}


def _qwen_vl(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    """Return grids of merged patches (tokens): one per image, and one per temporal patch of a video."""
    merge, grids = core.config.vision_config.spatial_merge_size, {}
    for kind, token in (("image", core.config.image_token_id), ("video", core.config.video_token_id)):
        if (sizes := inputs.get(f"{kind}_grid_thw")) is not None:
            grids[token] = [(h // merge, w // merge) for t, h, w in sizes.tolist() for _ in range(t)]
    return grids


def _onevision(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    """Return LLaVA-OneVision's grids: per image the whole image, then its joined tiles; per video each frame.

    The last column of the tiles' grid holds the newline features. A frame's grid has half the side of an
    image grid (rounded up), and a video ends with a newline, a 1 x 1 grid.
    """
    config, grids = core.config, {}
    side = config.vision_config.image_size // config.vision_config.patch_size
    half = -(-side // 2)  # rounded up, as in bilinear pooling to half the side
    if inputs.get("pixel_values") is not None:
        sizes = torch.as_tensor(inputs["image_sizes"]).tolist()
        numbers = inputs.get("batch_num_images")
        numbers = [1] * len(sizes) if numbers is None else numbers.tolist()
        # The processor splits an image into tiles only if it is the only image of its prompt.
        alone = [number == 1 for number in numbers for _ in range(number)]
        grids[config.image_token_id] = []
        for size, tiled in zip(sizes, alone, strict=True):
            rest = _joined_tiles(core, side, size) if tiled else (1, 1)
            grids[config.image_token_id] += [(side, side), rest]
    encoded = (inputs.get("mm_encoder_outputs") or {}).get("video")
    if encoded is not None:
        videos, tokens = encoded.pooler_output.shape[:2]
        frames = (tokens - 1) // half**2  # without the newline after the video
    elif inputs.get("pixel_values_videos") is not None:
        videos, frames = inputs["pixel_values_videos"].shape[:2]
    else:
        return grids
    return {**grids, config.video_token_id: ([(half, half)] * frames + [(1, 1)]) * videos}


def _joined_tiles(core: nn.Module, side: int, size: list[int]) -> tuple[int, int]:
    """Return the grid (rows, columns) of the joined tiles of an image of `size` (height, width).

    Calls the model's packing function with zeros as features, ones as newlines: the first 1 ends a row.
    """
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    config = core.config
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
    rest = packed[0][side * side :, 0]  # tokens after the tokens of the whole image
    columns = int(rest.nonzero()[0]) + 1 if len(rest) else 1
    return len(rest) // columns, columns


QWEN_VL = ModelAdapter(_qwen_vl, grids_need_media=True, multimodal_positions=True)
ADAPTERS = {
    # VisionZip ranks patches by attention in the second-last layer of the vision tower.
    "llava": ModelAdapter(_squares, lambda core: core.vision_tower.encoder.layers[-2].self_attn),
    "llava_onevision": ModelAdapter(_onevision, grids_need_media=True),
    "qwen2_vl": QWEN_VL,
    "qwen2_5_vl": QWEN_VL,
    "internvl": ModelAdapter(_squares),
    "smolvlm": ModelAdapter(_squares),
}
# Language models that `ModelAdapter.project` supports; True: queries and keys are normalised per head.
HEAD_NORM = {
    "llama": False,
    "qwen2": False,
    "mistral": False,
    "qwen3": True,
    "qwen2_vl_text": False,
    "qwen2_5_vl_text": False,
}


def adapter_of(core: nn.Module) -> ModelAdapter:
    """Return the adapter for a core model (without its head); ValueError if the family is not supported."""
    kind, text = core.config.model_type, core.config.get_text_config()
    if kind not in ADAPTERS:
        raise ValueError(
            f"no adapter for models of type '{kind}'; visual computation can be pruned in "
            f"{', '.join(sorted(ADAPTERS))}"
        )
    if text.model_type not in HEAD_NORM:
        raise ValueError(
            f"no adapter for '{kind}' over a language model of type '{text.model_type}'; "
            "add one in compression/model_adapters"
        )
    if other := [name for name in attention_types(text) if name != "full_attention"]:
        raise ValueError(f"layers of type {other} cannot be pruned; only full attention can")
    return replace(ADAPTERS[kind], head_norm=HEAD_NORM[text.model_type])
