"""Visual tokens attend to their neighbours on the picture."""

from __future__ import annotations

from torch import nn

from mmrl.compression.pruning.prune import prune
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import transform


@transform
def local_visual_attention(model: nn.Module, *, radius: NonNegativeInt = 2, causal: bool = True) -> nn.Module:
    """Let visual tokens see, of visual tokens, only those at most `radius` rows and columns away on their
    picture.

    The window has `2 * radius + 1` cells on a side. They go on seeing the text before them, and text goes on
    seeing everything. Pictures, tiles and frames are rasters of their own, which do not see each other.
    `causal` keeps earlier neighbours only, as the model was trained; the released LLaVA checkpoints see later
    ones too. A radius as large as the picture changes nothing where there is one picture. arXiv 2410.06169;
    rasters apart and the causal default are our reading.
    """
    if radius < 0:
        raise ValueError(f"`radius` counts cells, so it cannot be {radius}")
    options = {"radius": radius, "causal": causal}
    return prune(model, "local_visual_attention", options, **options)
