"""Qwen2-VL to Qwen3.5 on vLLM servers: grids, and patches as bytes, which the server normalises."""

from __future__ import annotations

from typing import Any

from mmrl.vision.models.families.qwen_vl import split_grids
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.serving.served_family import (
    AS_IMAGES,
    Item,
    ServedFamily,
    item_of,
    patches,
    split_items,
)


def _frames(encoder: PromptEncoder, encoded: EncodedPrompt) -> list[Item]:
    """Create an item per image and per time step of a video.

    In prompts of Qwen3-VL, a time stamp precedes every time step. The vision tower encodes each step alone,
    with the positions of an image. For a `video` item, vLLM would look for further time steps after the
    first, so each step is sent as an image item, at video placeholders.
    """
    config: Any = encoder.core.config
    items = []
    for part in split_grids(encoded.media):
        if "video_grid_thw" not in part:
            items.append(item_of(encoder, part, encoded.uid, patches))
            continue
        grid = part["video_grid_thw"].clone()
        frames = part["pixel_values_videos"].split(int(grid[0, 1:].prod()))
        grid[0, 0] = 1
        for frame in frames:
            image = {"pixel_values": frame, "image_grid_thw": grid}
            items.append(item_of(encoder, image, encoded.uid, patches, config.video_token_id))
    return items


FAMILIES = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"),
        ServedFamily({"image": "image", "video": "video"}, split_items(patches)),
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), ServedFamily(AS_IMAGES, _frames)),
}
