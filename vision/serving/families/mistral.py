"""Mistral 3: images are sent as files, because a row-end token interrupts the placeholders of an image."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from mmrl.vision.models.families.kept_sizes import FAMILIES as READ
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.serving.served_family import IMAGES, ServedFamily, as_bytes


def _files(encoder: PromptEncoder, encoded: EncodedPrompt) -> tuple[Tensor, list[bytes]]:
    """Return the token ids with one placeholder per image, and the resized images as PNG files.

    vLLM accepts image tensors only if their placeholders are contiguous, but row-end tokens separate these.
    For image files, vLLM inserts the row-end tokens itself. It does not resize the files again, because they
    already have the size of the policy's images.
    """
    from PIL import Image

    config: Any = encoder.core.config
    processor: Any = encoder.processor
    split = READ[config.model_type].split
    assert split is not None
    at = (encoded.ids == config.image_token_id).nonzero()[:, 0].tolist()
    side = config.vision_config.patch_size * config.spatial_merge_size
    kept, files, start = [], [], 0
    for part in split(encoded.media):
        rows, columns = (part["image_sizes"][0] // side).tolist()
        kept.append(encoded.ids[start : at[0] + 1])
        start, at = at[0] + rows * (columns + 1), at[rows * columns :]
        levels = as_bytes(processor.image_processor, part["pixel_values"], encoded.uid)[0]
        file = io.BytesIO()
        Image.fromarray(levels.permute(1, 2, 0).numpy()).save(file, "PNG", compress_level=1)
        files.append(file.getvalue())
    return torch.cat([*kept, encoded.ids[start:]]), files


FAMILIES = {"mistral3": ServedFamily(IMAGES, files=_files)}
