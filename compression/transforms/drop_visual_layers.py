"""Late layers without visual tokens."""

from __future__ import annotations

from torch import nn

from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import TokenReduction, add_reductions, shape_of
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import transform


@transform
def drop_visual_layers(model: nn.Module, *, after: PositiveInt) -> nn.Module:
    """Remove visual tokens after `after` layers: later layers compute and cache text only.

    Text keeps its positions. `after` equal to the number of layers changes nothing. arXiv 2410.06169; the
    released Qwen2-VL code simulates by a mask what is physically removed in this implementation.
    """
    layers = shape_of(model).layers
    if not 1 <= after <= layers:
        raise ValueError(f"`after` is a number of layers between 1 and {layers}, not {after}")
    reductions = add_reductions(model, [TokenReduction(after)])
    return prune(model, "drop_visual_layers", {"after": after}, reductions=reductions)
