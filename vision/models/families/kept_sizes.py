"""Mistral 3 and LFM2-VL: images keep their sizes, and squares of patches are merged."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmrl.vision.models.family import Inputs, VLMFamily, linear, split_images


def count_merged(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the image features of Mistral 3: one per square of patches of an image, without padding.

    Raises ValueError for a prompt with only one feature, because transformers 5.23 loses the feature axis.
    """
    if "pixel_values" not in inputs:
        return {}
    config: Any = core.config
    side = config.vision_config.patch_size * config.spatial_merge_size
    count = int((inputs["image_sizes"] // side).prod(-1).sum())
    if count == 1 and "input_ids" in inputs:  # the inputs are a whole prompt, not one image
        raise ValueError(
            f"an image of at most {side} x {side} pixels cannot be read alone by models of type "
            f"'{config.model_type}'; enlarge it"
        )
    return {config.image_token_id: count}


def count_shapes(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count LFM2-VL's image features: one per square of patches of an image or tile, without padding."""
    if "pixel_values" not in inputs:
        return {}
    config: Any = core.config
    return {config.image_token_id: int((inputs["spatial_shapes"] // config.downsample_factor).prod(-1).sum())}


def split_padded(media: Inputs) -> list[Inputs]:
    """Split images of different sizes, and remove their padding, so that equal images are equal tensors."""
    return [
        {"pixel_values": pixels[None, :, :height, :width], "image_sizes": size[None]}
        for pixels, size in zip(media["pixel_values"], media["image_sizes"], strict=True)
        for height, width in [size.tolist()]
    ]


FAMILIES = {
    "lfm2_vl": VLMFamily(linear, count_shapes, split_images),
    "mistral3": VLMFamily(linear, count_merged, split_padded),
}
