"""SmolVLM and Idefics3: tiles and frames, with text between them, are sent as images of one tile."""

from __future__ import annotations

from mmrl.vision.models.family import Inputs
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.serving.served_family import AS_IMAGES, IMAGES, Field, Item, ServedFamily, item_of, one


def _tile(encoder: PromptEncoder, part: Inputs, uid: str) -> dict[str, Field]:
    return {name: Field(value[0], "flat") for name, value in part.items()} | {"num_patches": one()}


def _tiles(encoder: PromptEncoder, encoded: EncodedPrompt) -> list[Item]:
    """Create an item per tile of `pixel_values` and `pixel_attention_mask`, which are (1, tiles, ...)."""
    names = ("pixel_values", "pixel_attention_mask")
    tiles = range(encoded.media[names[0]].shape[1])
    parts = [{name: encoded.media[name][:, i : i + 1] for name in names} for i in tiles]
    return [item_of(encoder, part, encoded.uid, _tile) for part in parts]


FAMILIES = {"smolvlm": ServedFamily(AS_IMAGES, _tiles), "idefics3": ServedFamily(IMAGES, _tiles)}
