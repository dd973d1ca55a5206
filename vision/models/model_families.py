"""What differs between families of vision-language models: positions, and how many features a picture makes.

A family is known by its `model_type`. One that is not listed gets one-dimensional positions, and its media
are counted by its own forward pass only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class VLMFamily:
    """How a family sees one prompt.

    `positions(core, inputs)` gives (A, S) rotary positions, A axes. `features(core, inputs)` gives the number
    of features that the media of the prompt make, by the id of their placeholder token.
    """

    positions: Callable[[nn.Module, Inputs], Tensor]
    features: Callable[[nn.Module, Inputs], dict[int, int]]


def _in_line(core: nn.Module, inputs: Inputs) -> Tensor:
    return torch.arange(inputs["input_ids"].shape[1])[None]


def _by_volumes(core: nn.Module, inputs: Inputs) -> Tensor:
    """Compute the positions (time, row, column) of Qwen2-VL and Qwen2.5-VL: (3, S) (arXiv 2409.12191,
    2502.13923).

    A token of text takes the next number on all axes. An image or a video of T x H x W features starts at the
    next number, and what follows it continues after the largest number of any axis. Qwen2.5-VL spaces a
    video's frames by seconds: floor(frame * seconds per frame * tokens per second).

    The weights were trained with this rule. `get_rope_index` of transformers 5.3 to 5.23 continues after the
    height or width of a video, inside its time axis, and that of 4.50 to 5.21 floors seconds before they are
    multiplied, so neither is used.
    """
    vision = core.config.vision_config
    rate = getattr(vision, "tokens_per_second", None)  # Qwen2-VL has none and counts frames
    grids = {1: iter(inputs.get("image_grid_thw", ())), 2: iter(inputs.get("video_grid_thw", ()))}
    seconds = iter(inputs.get("second_per_grid_ts", ()))
    kinds, parts, at, start = inputs["mm_token_type_ids"][0].tolist(), [], 0, 0
    while at < len(kinds):
        if kinds[at] == 0:
            text = next((i for i in range(at, len(kinds)) if kinds[i]), len(kinds)) - at
            part = torch.arange(text).expand(3, -1)
        else:
            frames, height, width = next(grids[kinds[at]]).tolist()
            time = torch.arange(frames)
            if kinds[at] == 2 and rate is not None:
                time = (time * next(seconds, 1.0) * rate).long()
            rows, columns = (torch.arange(side // vision.spatial_merge_size) for side in (height, width))
            part = torch.cartesian_prod(time, rows, columns).T
        parts.append(part + start)
        at, start = at + part.shape[1], int(parts[-1].max()) + 1
    return torch.cat(parts, 1)


def _on_grid(core: nn.Module, inputs: Inputs) -> Tensor:
    if not inputs["mm_token_type_ids"].any():
        return _in_line(core, inputs).expand(3, -1)
    wanted = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    # Given by keyword: the families do not agree on the order.
    return core.get_rope_index(**{name: inputs[name] for name in wanted if name in inputs})[0][:, 0]


def _count_grids(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    merged = core.config.vision_config.spatial_merge_size**2
    return {
        getattr(core.config, f"{kind}_token_id"): int((inputs[grid].prod(-1) // merged).sum())
        for kind, grid in (("image", "image_grid_thw"), ("video", "video_grid_thw"))
        if grid in inputs
    }


def _count_patches(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """LLaVA: every picture makes as many features as its tower has patches, with a class token if it is
    kept."""
    if "pixel_values" not in inputs:
        return {}
    config = core.config
    if "image_sizes" in inputs:
        each = (inputs["image_sizes"] // config.vision_config.patch_size).prod(-1).sum()
        return {config.image_token_id: int(each)}
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    extra = int(config.vision_feature_select_strategy == "full")
    return {config.image_token_id: inputs["pixel_values"].shape[0] * (patches + extra)}


def _count_tiles(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """InternVL: every tile makes the same number of features."""
    if "pixel_values" not in inputs:
        return {}
    return {core.config.image_token_id: inputs["pixel_values"].shape[0] * core.config.image_seq_length}


def _count_shuffled(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """SmolVLM: patches of every tile, shuffled together by the scale factor."""
    if "pixel_values" not in inputs:
        return {}
    vision = core.config.vision_config
    each = (vision.image_size // vision.patch_size) ** 2 // core.config.scale_factor**2
    return {core.config.image_token_id: inputs["pixel_values"].shape[1] * each}


def _count_packed(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """LLaVA-OneVision: features are unpadded and packed; the model's own packing, run on empty features,
    counts them."""
    config, counts = core.config, {}
    side = config.vision_config.image_size // config.vision_config.patch_size
    if "pixel_values" in inputs:
        tiles = [torch.zeros(tiles.shape[0], side * side, 1) for tiles in inputs["pixel_values"]]
        _, lengths = core.pack_image_features(
            tiles,
            inputs["image_sizes"],
            image_newline=torch.zeros(1),
            vision_aspect_ratio=config.vision_aspect_ratio,
        )
        counts[config.image_token_id] = int(torch.as_tensor(lengths).sum())
    if "pixel_values_videos" in inputs:
        clips, frames = inputs["pixel_values_videos"].shape[:2]
        counts[config.video_token_id] = clips * (frames * (-(-side // 2)) ** 2 + 1)
    return counts


_QWEN2 = VLMFamily(_by_volumes, _count_grids)
_QWEN3 = VLMFamily(_on_grid, _count_grids)
_PLAIN = VLMFamily(_in_line, lambda core, inputs: {})
FAMILIES: dict[str, VLMFamily] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "llava": VLMFamily(_in_line, _count_patches),
    "internvl": VLMFamily(_in_line, _count_tiles),
    "smolvlm": VLMFamily(_in_line, _count_shuffled),
    "llava_onevision": VLMFamily(_in_line, _count_packed),
}


def family_of(config: Any) -> VLMFamily:
    """Look a family up by `model_type`."""
    return FAMILIES.get(config.model_type, _PLAIN)
