"""Families in which every image or tile has the same number of features."""

from __future__ import annotations

from mmrl.vision.models.family import VLMFamily, linear, patches, per_image, split_images

FAMILIES = {
    "deepseek_vl": VLMFamily(linear, per_image(patches), split_images),
    "internvl": VLMFamily(linear, per_image(lambda c: c.image_seq_length), split_images),
    # Families with pixel shuffle, which merges squares of patches; pixel values are (1, tiles, ...).
    **dict.fromkeys(
        ("smolvlm", "idefics3"),
        VLMFamily(linear, per_image(lambda c: patches(c) // c.scale_factor**2, axis=1)),
    ),
    **dict.fromkeys(
        ("aya_vision", "cohere2_vision"),
        VLMFamily(linear, per_image(lambda c: patches(c) // c.downsample_factor**2), split_images),
    ),
    "gemma3": VLMFamily(linear, per_image(lambda c: c.mm_tokens_per_image), split_images, "token_type_ids"),
}
