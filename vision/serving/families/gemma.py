"""Gemma 3 (images of one size) and Gemma 4 (images and frames of any shape) on vLLM servers."""

from __future__ import annotations

from typing import Any

from mmrl.vision.models.family import Inputs
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.serving.served_family import (
    AS_IMAGES,
    IMAGES,
    Field,
    Item,
    ServedFamily,
    item_of,
    one_tile,
    split_items,
)

CAUSAL = (
    "on a CPU, vLLM lets no tokens of an image attend to later ones of it, as they do in the policy: its "
    "attention for CPUs has no such mask; serve on a GPU"
)


def _shape(encoder: PromptEncoder, part: Inputs, uid: str) -> dict[str, Field]:
    names = {"pixel_values": "pixel_values", "pixel_position_ids": "image_position_ids"}
    return {name: Field(part[own][0], "batched") for name, own in names.items()}


def _frames(encoder: PromptEncoder, encoded: EncodedPrompt) -> list[Item]:
    """Create an item per image and per video frame; in the prompt, each frame follows its time stamp."""
    config: Any = encoder.core.config
    split, items = family_of(config).split, []
    assert split is not None
    for part in split(encoded.media):
        if "pixel_values_videos" not in part:
            items.append(item_of(encoder, part, encoded.uid, _shape))
            continue
        pairs = zip(part["pixel_values_videos"], part["video_position_ids"], strict=True)
        for frame, places in pairs:
            image = {"pixel_values": frame[None], "image_position_ids": places[None]}
            items.append(item_of(encoder, image, encoded.uid, _shape, config.video_token_id))
    return items


FAMILIES = {
    "gemma3": ServedFamily(IMAGES, split_items(one_tile), cause=CAUSAL),
    "gemma4": ServedFamily(AS_IMAGES, _frames, cause=CAUSAL),
}
