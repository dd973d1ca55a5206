"""Head pruning for visual tokens only."""

from __future__ import annotations

from torch import nn

from mmrl.compression.importance import best_overall, check_chosen, check_share, first_units, read_plan
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import shape_of
from mmrl.config.ranges import NonNegativeInt, Probability
from mmrl.config.registry import transform


@transform
def drop_visual_heads(
    model: nn.Module,
    *,
    keep: Probability = 0.5,
    plan: str = "",
    whole: NonNegativeInt = 2,
    heads: tuple[tuple[NonNegativeInt, ...] | None, ...] | None = None,
) -> nn.Module:
    """Keep a share of the attention heads for visual tokens; text uses all heads among itself.

    In a dropped head visual tokens are neither queries nor keys. They are left out before the softmax, so
    that they need not be computed; the released code zeroes them after it. arXiv 2410.06169.

    Args:
        keep: Share of the query heads kept, in [0, 1].
        plan: Path of an importance plan: the heads with the most attention to visual tokens stay, ranked
            over all layers together (default: the first heads of every layer).
        whole: First layers that keep all heads; only with a `plan`.
        heads: Query heads to keep, listed per layer (`null`: all of that layer), instead of a share.
    """
    check_share("keep", keep)
    shape = shape_of(model)
    if heads is not None:
        chosen = check_chosen("heads", heads, shape.layers, shape.heads)
    elif plan:
        chosen = check_chosen(
            "heads", best_overall(read_plan(plan, "heads"), keep, whole), shape.layers, shape.heads
        )
    else:
        chosen = first_units(keep, shape.layers, shape.heads)
    return prune(model, "drop_visual_heads", {"heads": chosen}, heads=chosen)
