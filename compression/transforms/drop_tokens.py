"""Visual token reduction: FastV, PyramidDrop, VisionZip, DivPrune, ToMe."""

from __future__ import annotations

from functools import partial

from torch import nn

from mmrl.compression.importance import check_share
from mmrl.compression.model_adapters.lookup import adapter_of
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import TokenReduction, add_reductions, core_of, shape_of
from mmrl.compression.pruning.token_selection import (
    div_prune_selection,
    fastv_selection,
    pyramid_drop_selection,
    stage_layers,
    tome_selection,
    vision_zip_selection,
)
from mmrl.config.ranges import NonNegativeInt, PositiveInt, Probability
from mmrl.config.registry import transform


@transform
def fastv(model: nn.Module, *, after: PositiveInt = 2, keep: Probability = 0.5) -> nn.Module:
    """Keep the visual tokens that the last prompt token attends to most (FastV, arXiv 2403.06764).

    The ranking is the attention of layer `after`, mean over heads, computed once during the prefill as one
    extra row of attention. Kept tokens keep their positions.

    Args:
        after: Number of layers that process all visual tokens, at least 1 (the paper's K = 2).
        keep: Share of visual tokens kept, in [0, 1] (the paper's R = 50 % drops half).
    """
    check_share("keep", keep)
    if after < 1:
        raise ValueError(f"`after` counts layers that see all tokens: at least 1, not {after}")
    reductions = add_reductions(
        model, [TokenReduction(after, partial(fastv_selection, keep=keep), probe=True)]
    )
    return prune(model, "fastv", {"after": after, "keep": keep}, reductions=reductions)


@transform
def pyramid_drop(
    model: nn.Module,
    *,
    keep: tuple[Probability, ...] = (0.5, 0.25, 0.125),
    layers: tuple[NonNegativeInt, ...] | None = None,
) -> nn.Module:
    """Keep fewer visual tokens from stage to stage of the layers (PyramidDrop, arXiv 2410.17247).

    Tokens are ranked by the attention of the last prompt token, with the projections of the first layer of
    the stage. The released code renumbers positions; here tokens keep theirs (our reading), so that the rows
    of a cache agree.

    Args:
        keep: Share of the prompt's visual tokens left in each stage after the first, in [0, 1].
        layers: First layer of each of these stages, one per share (default: stages of equal length).
    """
    for share in keep:
        check_share("keep", share)
    starts = tuple(layers) if layers is not None else stage_layers(shape_of(model).layers, len(keep) + 1)
    if len(starts) != len(keep):
        raise ValueError(f"{len(keep)} shares for {len(starts)} layers; give one for each")
    reductions = [
        TokenReduction(layer, partial(pyramid_drop_selection, keep=share))
        for layer, share in zip(starts, keep, strict=True)
    ]
    options = {"keep": tuple(keep), "layers": starts}
    return prune(model, "pyramid_drop", options, reductions=add_reductions(model, reductions))


@transform
def vision_zip(
    model: nn.Module, *, dominant: NonNegativeInt = 54, contextual: NonNegativeInt = 10
) -> nn.Module:
    """Keep the dominant patches of every image and merge the others into a few (VisionZip).

    Dominant patches get the most attention from the class token of the vision tower; every other patch is
    averaged into the contextual patch with the most similar key. Needs a tower with a class token that the
    language model does not see. Patches are merged after the projector (our reading; the released code
    merges before it). arXiv 2412.04467.

    Args:
        dominant: Dominant patches per image (the paper's 54 of 64 tokens).
        contextual: Contextual patches per image (the paper's 10 of 64 tokens).
    """
    core = core_of(model)
    if adapter_of(core).class_token_attention is None:
        raise ValueError(
            f"the tower of '{core.config.model_type}' has no class token to rank patches by; "
            "use another way to choose visual tokens"
        )
    heads = core.config.vision_config.num_attention_heads
    choose = partial(vision_zip_selection, dominant=dominant, contextual=contextual, heads=heads)
    options = {"dominant": dominant, "contextual": contextual}
    return prune(
        model,
        "vision_zip",
        options,
        reductions=add_reductions(model, [TokenReduction(0, choose)]),
        tower=True,
    )


@transform
def div_prune(model: nn.Module, *, keep: Probability = 0.098) -> nn.Module:
    """Keep the share `keep` of visual tokens that differ most from each other (DivPrune).

    Tokens are chosen before the first layer, greedily, to maximise the smallest distance (1 - cosine)
    between kept tokens. arXiv 2503.02175.
    """
    check_share("keep", keep)
    reductions = add_reductions(model, [TokenReduction(0, partial(div_prune_selection, keep=keep))])
    return prune(model, "div_prune", {"keep": keep}, reductions=reductions)


@transform
def tome(model: nn.Module, *, keep: Probability = 0.5, before: NonNegativeInt = 0) -> nn.Module:
    """Merge the most similar visual tokens of a prompt (ToMe, arXiv 2210.09461).

    Bipartite soft matching on hidden states until the share `keep` is left, before layer `before`. Means are
    weighted by the number of tokens that each stands for, and a merged token keeps the position of one of
    them. Attention is not weighted by size (our reading: keys are cached once).
    """
    check_share("keep", keep)
    reductions = add_reductions(model, [TokenReduction(before, partial(tome_selection, keep=keep))])
    return prune(model, "tome", {"keep": keep, "before": before}, reductions=reductions)
