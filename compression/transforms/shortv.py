"""ShortV: layers that leave visual tokens unchanged."""

from __future__ import annotations

from torch import nn

from mmrl.compression.importance import check_share, read_plan
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import shape_of
from mmrl.config.ranges import NonNegativeInt, Probability
from mmrl.config.registry import transform


@transform
def shortv(
    model: nn.Module,
    *,
    freeze: Probability = 0.6,
    plan: str = "",
    layers: tuple[NonNegativeInt, ...] | None = None,
) -> nn.Module:
    """Skip visual tokens in the least important layers; text still attends to them there (ShortV).

    Frozen layers add nothing to the hidden states of visual tokens. arXiv 2504.00502.

    Args:
        freeze: Share of the layers that are frozen for visual tokens, in [0, 1] (the paper's 0.6).
        plan: Path of an importance plan, of which the layers with the lowest scores are frozen.
        layers: Layers to freeze, counted from 0, instead of a share and a plan.
    """
    check_share("freeze", freeze)
    total = shape_of(model).layers
    if layers is None:
        if not plan:
            raise ValueError(
                "`shortv` needs a `plan` with the importance of layers, or the `layers` to freeze"
            )
        scores = read_plan(plan, "layers")
        layers = tuple(
            sorted(range(total), key=lambda layer: (scores[layer], layer))[: round(freeze * total)]
        )
    wrong = [layer for layer in layers if not 0 <= layer < total]
    if wrong:
        raise ValueError(f"the model has {total} layers, so there is no layer {wrong[0]}")
    chosen = tuple(sorted(set(layers)))
    return prune(model, "shortv", {"layers": chosen}, frozen=frozenset(chosen))
