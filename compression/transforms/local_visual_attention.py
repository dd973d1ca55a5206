"""Windowed attention among visual tokens."""

from __future__ import annotations

from torch import nn

from mmrl.compression.pruning.prune import prune
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import transform


@transform
def local_visual_attention(model: nn.Module, *, radius: NonNegativeInt = 2, causal: bool = True) -> nn.Module:
    """Restrict attention between visual tokens to a window on the patch grid of their image.

    The window has `2 * radius + 1` patches on a side. Visual tokens still attend to the text before them,
    and text attends to everything. Every image, tile and video frame is a patch grid of its own, and grids
    do not attend to each other. `causal` keeps earlier neighbours only, as the model was trained; the
    released LLaVA checkpoints attend to later ones too. With one image, a radius as large as the image
    changes nothing. arXiv 2410.06169; separate grids and the causal default are our reading.
    """
    if radius < 0:
        raise ValueError(f"`radius` counts cells, so it cannot be {radius}")
    options = {"radius": radius, "causal": causal}
    return prune(model, "local_visual_attention", options, **options)
