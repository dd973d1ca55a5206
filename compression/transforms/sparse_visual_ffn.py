"""Feed-forward pruning for visual tokens only."""

from __future__ import annotations

from torch import nn

from mmrl.compression.importance import best_each, check_chosen, check_share, first_units, read_plan
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import shape_of
from mmrl.config.ranges import NonNegativeInt, Probability
from mmrl.config.registry import transform


@transform
def sparse_visual_ffn(
    model: nn.Module,
    *,
    keep: Probability = 0.5,
    plan: str = "",
    ffn_units: tuple[tuple[NonNegativeInt, ...] | None, ...] | None = None,
) -> nn.Module:
    """Keep a share of the inner units of every feed-forward layer for visual tokens; text uses all.

    The first units stay by default, as in the paper, which fine-tunes with them. arXiv 2410.06169.

    Args:
        keep: Share of the inner units kept, in [0, 1].
        plan: Path of an importance plan, of which the most active units stay (our reading, for use without
            fine-tuning); costs a copy of their weights in every call.
        ffn_units: Inner units to keep, listed per layer (`null`: all of that layer), instead of a share.
    """
    check_share("keep", keep)
    shape = shape_of(model)
    if ffn_units is not None:
        chosen = check_chosen("ffn_units", ffn_units, shape.layers, shape.inner)
    elif plan:
        chosen = check_chosen(
            "ffn_units", best_each(read_plan(plan, "ffn_units"), keep), shape.layers, shape.inner
        )
    else:
        chosen = first_units(keep, shape.layers, shape.inner)
    return prune(model, "sparse_visual_ffn", {"ffn_units": chosen}, ffn_units=chosen)
