"""Token pruners that users compare with: FastV, PyramidDrop, VisionZip, DivPrune."""

from __future__ import annotations

from functools import partial

from torch import nn

from mmrl.compression.importance import check_share
from mmrl.compression.model_adapters.lookup import decoder_of
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import Cut, add_cuts, core_of, shape_of
from mmrl.compression.pruning.token_selection import (
    most_diverse,
    most_ranked,
    most_seen,
    stage_layers,
    tower_choice,
)
from mmrl.config.ranges import NonNegativeInt, PositiveInt, Probability
from mmrl.config.registry import transform


@transform
def fastv(model: nn.Module, *, after: PositiveInt = 2, keep: Probability = 0.5) -> nn.Module:
    """Keep the share of visual tokens that the last prompt token attended to most in layer `after`, mean over
    heads.

    The choice is made once, when the prompt is read, from one row of attention that is computed beside the
    fast path. Positions stay. arXiv 2403.06764.
    """
    check_share("keep", keep)
    if after < 1:
        raise ValueError(f"`after` counts layers that see all tokens: at least 1, not {after}")
    cuts = add_cuts(model, [Cut(after, partial(most_seen, keep=keep), probe=True)])
    return prune(model, "fastv", {"after": after, "keep": keep}, cuts=cuts)


@transform
def pyramid_drop(
    model: nn.Module,
    *,
    keep: tuple[Probability, ...] = (0.5, 0.25, 0.125),
    layers: tuple[NonNegativeInt, ...] | None = None,
) -> nn.Module:
    """Keep fewer visual tokens from stage to stage: shares of all there were, ranked by the last prompt token
    with the projections of the stage's first layer.

    Stages are of equal length unless `layers` names their first layers. The released code numbers positions
    anew; here tokens keep theirs (our reading), so that rows of a cache agree. arXiv 2410.17247.
    """
    for share in keep:
        check_share("keep", share)
    starts = tuple(layers) if layers is not None else stage_layers(shape_of(model).layers, len(keep) + 1)
    if len(starts) != len(keep):
        raise ValueError(f"{len(keep)} shares for {len(starts)} layers; give one for each")
    cuts = [Cut(layer, partial(most_ranked, keep=share)) for layer, share in zip(starts, keep, strict=True)]
    options = {"keep": tuple(keep), "layers": starts}
    return prune(model, "pyramid_drop", options, cuts=add_cuts(model, cuts))


@transform
def vision_zip(
    model: nn.Module, *, dominant: NonNegativeInt = 54, contextual: NonNegativeInt = 10
) -> nn.Module:
    """Keep, of every picture, the `dominant` patches that the tower's class token attends to most and
    `contextual` others, which take up the mean of the rest by likeness of keys.

    Needs a tower with a class token that is not shown to the language model. Patches are merged behind the
    projector (our reading; the released code merges before it). arXiv 2412.04467.
    """
    core = core_of(model)
    if decoder_of(core).ranker is None:
        raise ValueError(
            f"the tower of '{core.config.model_type}' has no class token to rank patches by; "
            "use another way to choose visual tokens"
        )
    heads = core.config.vision_config.num_attention_heads
    choose = partial(tower_choice, dominant=dominant, contextual=contextual, heads=heads)
    options = {"dominant": dominant, "contextual": contextual}
    return prune(model, "vision_zip", options, cuts=add_cuts(model, [Cut(0, choose)]), tower=True)


@transform
def div_prune(model: nn.Module, *, keep: Probability = 0.098) -> nn.Module:
    """Keep a share of the visual tokens of a prompt that differ most from each other, before the first layer.

    Greedy: the smallest of the distances (1 - cosine) between kept tokens is made large. arXiv 2503.02175.
    """
    check_share("keep", keep)
    cuts = add_cuts(model, [Cut(0, partial(most_diverse, keep=keep))])
    return prune(model, "div_prune", {"keep": keep}, cuts=cuts)
