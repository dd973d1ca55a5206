"""InternVL3 and 3.5 on vLLM servers: every tile and video frame is sent as an image of one tile."""

from __future__ import annotations

from typing import Any

from mmrl.vision.models.family import Inputs
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.serving.served_family import AS_IMAGES, Field, ServedFamily, one, split_items


def _tile(encoder: PromptEncoder, part: Inputs, uid: str) -> dict[str, Field]:
    config: Any = encoder.core.config
    return {
        "pixel_values": Field(part["pixel_values"], "flat"),
        "image_num_patches": one(),
        "image_token_id": Field(config.image_token_id, "shared", on_cpu=True),
    }


FAMILIES = {"internvl": ServedFamily(AS_IMAGES, split_items(_tile))}
