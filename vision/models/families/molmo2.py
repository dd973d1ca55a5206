"""Molmo2: crops of images, patches pooled by index, and attention among the tokens of all images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmrl.vision.models.family import Inputs, VLMFamily, linear

# Config keys of image tokens; the config class of transformers 5.23 lacks the last two.
TOKENS = (
    *("image_patch_id", "image_start_token_id", "low_res_image_start_token_id", "image_end_token_id"),
    *("frame_start_token_id", "frame_end_token_id", "image_col_id", "image_low_res_id"),
)


def _kinds(config: Any, ids: Tensor) -> Tensor:
    """Return token types: 1 for tokens of images and frames (with borders and line breaks), else 0."""
    tokens = [getattr(config, name) for name in TOKENS if getattr(config, name, None) is not None]
    return torch.isin(ids, ids.new_tensor(tokens)).long()


def count(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the image features: one per pooled square of patches of an image and of its crops.

    Raises ValueError if the processor marks image tokens whose ids are not in the model config.
    """
    if "image_grids" not in inputs:
        return {}
    config: Any = core.config
    types = inputs["mm_token_type_ids"]
    if odd := inputs["input_ids"][types != _kinds(config, inputs["input_ids"])].unique().tolist():
        raise ValueError(
            f"the processor counts the tokens {odd} to images, and the configuration does not name them; set "
            f"{' and '.join(TOKENS[-2:])} in the model's config.json"
        )
    grids = inputs["image_grids"]
    return {config.image_token_id: int((grids[:, :2].prod(-1) + grids[:, 2:].prod(-1)).sum())}


def _starts(media: Inputs) -> Tensor:
    """Return the index (features, 1) of the first patch in the image of each pooled feature."""
    crops, grids = media["image_num_crops"], media["image_grids"]
    starts = (crops.cumsum(0) - crops) * media["pixel_values"].shape[1]
    return starts.repeat_interleave(grids[:, :2].prod(-1) + grids[:, 2:].prod(-1))[:, None]


def from_each_image(inputs: Inputs) -> dict[str, Tensor]:
    """Make patch indices relative to their image (from 1; 0: no patch), and convert videos to images.

    So tensors of several prompts can be concatenated and padded with 0. The model computes a video as an
    image without tiles, and refuses images and videos in a batch. Raises ValueError for a prompt with both.
    """
    inputs = dict(inputs)
    if "pixel_values_videos" in inputs:
        if "pixel_values" in inputs:
            raise ValueError("this model takes images or a video, not both; give frames as images")
        frames, rows, columns = inputs.pop("video_grids").unbind(-1)
        none = torch.zeros_like(rows)
        inputs |= {
            "pixel_values": inputs.pop("pixel_values_videos"),
            "image_token_pooling": inputs.pop("video_token_pooling"),
            "image_grids": torch.stack([frames * rows, columns, none, none], -1),
            "image_num_crops": frames,
        }
    if "pixel_values" in inputs:
        pooled = inputs["image_token_pooling"]
        inputs["image_token_pooling"] = (pooled - _starts(inputs) + 1).masked_fill(pooled < 0, 0)
    return inputs


def from_the_first(core: nn.Module, media: Inputs) -> dict[str, Tensor]:
    """Convert patch indices from per-image to batch-wide (from 0; -1: no patch); undoes `from_each_image`."""
    if "pixel_values" not in media:
        return dict(media)
    pooled = media["image_token_pooling"]
    return {**media, "image_token_pooling": (pooled - 1 + _starts(media)).masked_fill(pooled == 0, -1)}


FAMILIES = {
    "molmo2": VLMFamily(
        linear,
        count,
        types="mm_token_type_ids",
        kinds=_kinds,
        prepare=from_each_image,
        assemble=from_the_first,
        media_in_replies=False,
    )
}
