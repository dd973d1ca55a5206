"""LLaVA and LLaVA-NeXT on vLLM servers: an image or its tiles, with the image size before tiling."""

from __future__ import annotations

from mmrl.vision.models.family import Inputs
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.serving.served_family import IMAGES, Field, ServedFamily, split_items


def _stacked(encoder: PromptEncoder, part: Inputs, uid: str) -> dict[str, Field]:
    return {
        name: Field(value[0], "batched", on_cpu=name == "image_sizes")
        for name, value in part.items()
        if name in ("pixel_values", "image_sizes")
    }


FAMILIES = dict.fromkeys(("llava", "llava_next"), ServedFamily(IMAGES, split_items(_stacked)))
