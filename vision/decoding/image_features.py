"""Vision features that are computed once per distinct image of a batch, not once per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.vision.decoding.prefill import merge_media
from mmrl.vision.models.model_families import family_of

Media = Mapping[str, Tensor]
PIXELS, GRID = "pixel_values", "image_grid_thw"
SUPPORTED = {PIXELS, GRID, "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
SUPPORTED |= {"video_second_per_grid", "input_features", "feature_attention_mask"}


@contextmanager
def distinct_images(
    core: nn.Module, media: Sequence[Media], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield the merged media tensors of rows; inside the context, `core` encodes equal images only once.

    The context replaces `core.get_image_features`, for models whose images are patches with a grid (Qwen) or
    one tensor each (LLaVA, InternVL). In other models, every image is encoded.
    """
    split = family_of(core.config).split if all(tensors.keys() <= SUPPORTED for tensors in media) else None
    images = [
        image
        for tensors in media
        if split and PIXELS in tensors
        for image in split({name: tensors[name] for name in (PIXELS, GRID) if name in tensors})
    ]
    distinct, which = find_distinct(images)
    if len(distinct) == len(which) or not hasattr(core, "get_image_features"):
        yield merge_media(core, media, device)
        return
    rest = [{name: value for name, value in tensors.items() if name != PIXELS} for tensors in media]
    merged, once = (merge_media(core, parts, device) for parts in (rest, distinct))
    compute = core.get_image_features

    def features(*args: Any, **options: Any) -> Any:
        """Compute the features of distinct images, and repeat them for all images."""
        # Replace the model's argument (positional or keyword) with the grids of all images.
        args = tuple(once[GRID] if x is not None and x is merged.get(GRID) else x for x in args)
        options |= {GRID: once[GRID]} if GRID in options else {}
        output = compute(*args, **options)
        sizes = [len(x) for x in output.pooler_output]
        for name in ("pooler_output", "deepstack_features"):  # one entry per image, or per layer and image
            if (value := getattr(output, name, None)) is not None:
                setattr(output, name, repeat(value, which, sizes))
        return output

    core.get_image_features = features  # shadows the method of the class
    try:
        yield {**merged, PIXELS: once[PIXELS]}
    finally:
        del core.get_image_features


def find_distinct(images: Sequence[Media]) -> tuple[list[Media], list[int]]:
    """Deduplicate images by content; return the distinct images, and every image's index among them."""
    distinct: list[Media] = []
    which = []
    for image in images:
        # Comparisons are cheap: they end at the first pixel that differs.
        same = (all(torch.equal(image[name], other[name]) for name in image) for other in distinct)
        number = next((i for i, equal in enumerate(same) if equal), len(distinct))
        if number == len(distinct):
            distinct.append(image)
        which.append(number)
    return distinct, which


def repeat(features: Any, which: Sequence[int], sizes: Sequence[int]) -> Any:
    """Repeat the features of distinct images: image i gets the features of distinct image `which[i]`.

    Features are a list or a tensor with one entry per distinct image, one tensor with the tokens of all
    distinct images (`sizes` has their numbers of tokens), or a list with such a value for each layer.
    """
    match features:
        case Tensor() if len(features) == len(sizes) and features.dim() > 2:
            return features[list(which)]
        case Tensor():
            pieces = features.split(list(sizes))
            return torch.cat([pieces[i] for i in which])
        case [Tensor(), *_] if len(features) == len(sizes) and all(
            len(x) == n for x, n in zip(features, sizes, strict=True)
        ):
            return type(features)(features[i] for i in which)
    return [repeat(layer, which, sizes) for layer in features]
