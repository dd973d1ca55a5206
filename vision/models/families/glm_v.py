"""GLM-4.1V, GLM-4.5V and GLM-4.6V: Qwen's grids; video frames use the placeholder of images."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from mmrl.vision.models.families.qwen_vl import count_grids, get_rope_index, split_grids
from mmrl.vision.models.family import Inputs, VLMFamily

IMAGES = ("pixel_values", "image_grid_thw")
VIDEOS = ("pixel_values_videos", "video_grid_thw")


def frames_as_images(inputs: Inputs) -> dict[str, Tensor]:
    """Convert each time step of a video to an image, and order all images like their placeholders.

    The models treat a time step of a video like an image, and give its tokens the positions of an image. But
    their forward pass fails if a batch has both images and videos, because it looks for both at the same
    placeholders. Raises ValueError unless every image and frame has its own run of placeholders.
    """
    if VIDEOS[0] not in inputs:
        return dict(inputs)
    patches, grids = (inputs[name] for name in VIDEOS)
    steps = grids.repeat_interleave(grids[:, 0], 0).index_fill(1, torch.tensor([0]), 1)
    images = split_grids({name: inputs[name] for name in IMAGES if name in inputs})
    media = {1: images, 2: split_grids(dict(zip(IMAGES, (patches, steps), strict=True)))}
    types = inputs["mm_token_type_ids"]
    order = [kind for kind, _ in groupby(types[0].tolist()) if kind]  # every run of placeholders is an image
    if any(order.count(kind) != len(found) for kind, found in media.items()):
        raise ValueError(
            f"it has {order.count(1)} runs of image placeholders and {order.count(2)} of video placeholders "
            f"for {len(images)} images and {len(steps)} video frames; does its chat template write the "
            "tokens that begin and end images and videos?"
        )
    left = {kind: iter(found) for kind, found in media.items()}
    ordered = [next(left[kind]) for kind in order]
    merged = {name: torch.cat([one[name] for one in ordered]) for name in IMAGES}
    rest = {name: value for name, value in inputs.items() if name not in VIDEOS}
    return rest | merged | {"mm_token_type_ids": types.clamp(max=1)}


FAMILIES = dict.fromkeys(
    ("glm4v", "glm4v_moe", "glm46v"),
    VLMFamily(get_rope_index, count_grids, split_grids, prepare=frames_as_images),
)
