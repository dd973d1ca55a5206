"""Visual tokens keep some heads of attention."""

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
    """Keep a share of the query heads for visual tokens: the others neither look from them nor at them.

    With a `plan` the heads that pay most attention to visual tokens stay, over all layers together, and the
    first `whole` layers keep all; without one the first heads of every layer stay. `heads` names them, layer
    by layer (`None`: all). A dropped head leaves visual columns out before the softmax, so it need not
    compute them; the released code zeroes them behind it. arXiv 2410.06169.
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
