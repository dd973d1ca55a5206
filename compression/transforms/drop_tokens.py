"""Selection and merging of visual tokens: FastV, PyramidDrop, VisionZip, DivPrune, ToMe."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmrl.compression.model_adapters.families import adapter_of
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import TokenReduction, shape_of
from mmrl.compression.pruning.token_stages import TokenStage
from mmrl.config.ranges import NonNegativeInt, PositiveInt, Probability
from mmrl.config.registry import transform

Chosen = tuple[Tensor, Tensor]  # mask (B, n_v) of the visual tokens to keep, states of all visual tokens


@transform
def fastv(model: nn.Module, *, after: PositiveInt = 2, keep: Probability = 0.5) -> nn.Module:
    """Keep the visual tokens that the last prompt token attends to most (FastV, arXiv 2403.06764).

    Tokens are ranked once, during the prefill, by the attention of layer `after`, averaged over heads. The
    remaining tokens keep their position ids.

    Args:
        after: Number of layers that process all visual tokens, at least 1 (the paper's K = 2).
        keep: Fraction of the visual tokens to keep, in [0, 1] (the paper's R = 50 % drops half).
    """

    def choose(stage: TokenStage, vis: Tensor, scores: Tensor) -> Chosen:
        return top_mask(scores, stage.is_token, (stage.is_token.sum(1) * keep).round().long()), vis

    reductions = [TokenReduction(after, choose, scores="previous")]
    return prune(model, "fastv", {"after": after, "keep": keep}, reductions=reductions)


@transform
def pyramid_drop(
    model: nn.Module,
    *,
    keep: tuple[Probability, ...] = (0.5, 0.25, 0.125),
    layers: tuple[NonNegativeInt, ...] | None = None,
) -> nn.Module:
    """Keep fewer visual tokens in each later stage of the layers (PyramidDrop, arXiv 2410.17247).

    Tokens are ranked by the attention of the last prompt token in the first layer of a stage. Our reading:
    tokens keep their position ids, so that all cache layers agree; the released code renumbers them.

    Args:
        keep: Fraction of all visual tokens that remain in each stage after the first, in [0, 1].
        layers: First layer of each stage after the first, one per entry of `keep`. Default: equal stages.
    """
    if layers is None:
        total, stages = shape_of(model).layers, len(keep) + 1
        layers = tuple(total * i // stages for i in range(1, stages))  # the first stage has all tokens
    if len(layers) != len(keep):
        raise ValueError(f"{len(keep)} shares for {len(layers)} layers; give one for each")

    def choose(stage: TokenStage, vis: Tensor, scores: Tensor, *, share: float) -> Chosen:
        return top_mask(scores, stage.is_token, (stage.call.layout.visual.sum(1) * share).long()), vis

    reductions = [
        TokenReduction(layer, partial(choose, share=share), scores="layer")
        for layer, share in zip(layers, keep, strict=True)
    ]
    options = {"keep": tuple(keep), "layers": tuple(layers)}
    return prune(model, "pyramid_drop", options, reductions=reductions)


def top_mask(scores: Tensor, is_token: Tensor, numbers: Tensor) -> Tensor:
    """Mark the `numbers` (B,) real tokens with the highest scores (B, n); earlier tokens win ties."""
    ranked = scores.masked_fill(~is_token, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    # Compute the rank of every token: the inverse of the sorting permutation.
    order = torch.arange(ranked.shape[1]).to(ranked).expand_as(ranked)
    place = torch.empty_like(ranked).scatter_(1, ranked, order)
    return is_token & (place < numbers[:, None])


@transform
def vision_zip(
    model: nn.Module, *, dominant: NonNegativeInt = 54, contextual: NonNegativeInt = 10
) -> nn.Module:
    """Keep the dominant patches of an image and merge the others into a few (VisionZip, arXiv 2412.04467).

    Dominant patches get the most attention from the vision tower's class token. Contextual patches are evenly
    spaced among the others, and each remaining patch is averaged into the contextual patch with the most
    similar key. Needs a tower whose class token is not passed to the language model. Our reading: patches are
    merged after the projector; the released code merges before it.

    Args:
        dominant: Number of dominant patches per image (the paper's 54 of 64 tokens).
        contextual: Number of contextual patches per image (the paper's 10 of 64 tokens).
    """
    core = model.base_model
    if adapter_of(core).class_token_attention is None:
        raise ValueError(
            f"the tower of '{core.config.model_type}' has no class token to rank patches by; "
            "use another way to choose visual tokens"
        )
    heads = core.config.vision_config.num_attention_heads

    def choose(stage: TokenStage, vis: Tensor, scores: None) -> Chosen:
        if not stage.call.layout.tower:
            raise ValueError(
                "`vision_zip` ranks patches while the pruned model encodes them; pass pixels, or features "
                "that it encoded"
            )
        # Queries and keys of the tower: (images, 1 + patches, H, D).
        q, k = (stage.call.layout.tower[name].unflatten(-1, (heads, -1)) for name in ("q", "k"))
        # Attention of the class token (query 0) to all patches, later summed over heads.
        weights = torch.einsum("fhd,fnhd->fhn", q[:, 0], k) * q.shape[-1] ** -0.5
        seen = weights.float().softmax(-1).sum(1)[:, 1:]  # the class token itself is not a patch
        keys = F.normalize(k[:, 1:].mean(2).float(), dim=-1)
        rows, columns = stage.is_token.nonzero(as_tuple=True)  # one entry per image and patch, in image order
        if seen.numel() != len(rows):
            raise ValueError(
                f"the tower saw {seen.shape[0]} images of {seen.shape[1]} patches for {len(rows)} visual "
                "tokens; images and placeholders must be passed in one call"
            )
        images = zip(vis[stage.is_token].view(*seen.shape, -1), seen, keys, strict=True)
        stay, changed = zip(
            *(vision_zip_image(*image, dominant, contextual) for image in images), strict=True
        )
        kept = torch.zeros_like(stage.is_token).index_put((rows, columns), torch.cat(stay))
        return kept, vis.index_put((rows, columns), torch.cat(changed))

    options = {"dominant": dominant, "contextual": contextual}
    return prune(model, "vision_zip", options, reductions=[TokenReduction(0, choose)], tower=True)


def vision_zip_image(
    states: Tensor, seen: Tensor, keys: Tensor, dominant: int, contextual: int
) -> tuple[Tensor, Tensor]:
    """Select and merge n patches; return the mask (n,) of those that stay, and all states (n, width)."""
    n = len(states)
    stay = torch.zeros(n, dtype=torch.bool, device=states.device)
    stay[seen.topk(min(dominant, n)).indices] = True
    rest = (~stay).nonzero()[:, 0]
    number = min(contextual, len(rest))
    if not number:
        return stay, states
    # The contextual patches, into which others are merged, are evenly spaced among the rest.
    targets = rest[torch.arange(0, len(rest), max(1, len(rest) // number))[:number]]
    stay[targets] = True
    others = rest[~torch.isin(rest, targets)]
    nearest = (keys[others] @ keys[targets].T).argmax(1)  # cosine similarity of the tower's keys
    total = states.new_zeros(number, states.shape[1]).index_add(0, nearest, states[others])
    count = torch.bincount(nearest, minlength=number).clamp(min=1)[:, None]
    return stay, states.index_add(0, targets, total / count)  # target + mean of its patches


@transform
def div_prune(model: nn.Module, *, keep: Probability = 0.098) -> nn.Module:
    """Keep the fraction `keep` of visual tokens that differ most (DivPrune, arXiv 2503.02175).

    Tokens are chosen before the first layer, greedily, to maximise their smallest distance (1 - cosine).
    """

    def choose(stage: TokenStage, vis: Tensor, scores: None) -> Chosen:
        kept = torch.zeros_like(stage.is_token)
        for row, states in enumerate(vis.detach()):
            at = stage.is_token[row].nonzero()[:, 0]
            kept[row, at[max_min_diversity(states[at], round(keep * len(at)))]] = True
        return kept, vis

    return prune(model, "div_prune", {"keep": keep}, reductions=[TokenReduction(0, choose)])


def max_min_diversity(states: Tensor, number: int) -> Tensor:
    """Choose `number` of n states (n, width) by greedy max-min distance; returns their indices.

    The first choice has the most distant nearest neighbour. Each next choice is farthest from all chosen.
    """
    if number >= len(states):
        return torch.arange(len(states), device=states.device)
    # The distance is 1 - cosine. The diagonal is excluded: a state is not its own nearest neighbour.
    unit = F.normalize(states.to(torch.promote_types(states.dtype, torch.float32)), dim=-1)
    far = 1 - unit @ unit.T
    nearest, chosen = far.clone().fill_diagonal_(float("inf")).min(1).values, []
    while len(chosen) < number:
        chosen.append(int(nearest.argmax()))
        distance = far[chosen[-1]]
        nearest = distance.clone() if len(chosen) == 1 else torch.minimum(nearest, distance)
        nearest[chosen[-1]] = float("-inf")
    return torch.tensor(chosen, dtype=torch.int64, device=states.device)


@transform
def tome(model: nn.Module, *, keep: Probability = 0.5, before: NonNegativeInt = 0) -> nn.Module:
    """Merge the most similar visual tokens of a prompt (ToMe, arXiv 2210.09461).

    Uses bipartite soft matching on the hidden states before layer `before`, until the fraction `keep`
    remains. Means are weighted by the number of original tokens. A merged token has the position of one of
    its tokens. Our reading: attention counts a merged token once, as the cache holds one key for it.
    """

    def choose(stage: TokenStage, vis: Tensor, scores: None) -> Chosen:
        kept, rows = torch.zeros_like(stage.is_token), []
        for row, states in enumerate(vis):
            at = stage.is_token[row].nonzero()[:, 0]
            left, means = bipartite_soft_matching(states[at], round(keep * len(at)))
            kept[row, at[left]] = True
            rows.append(states.index_copy(0, at[left], means))
        return kept, torch.stack(rows)

    return prune(model, "tome", {"keep": keep, "before": before}, reductions=[TokenReduction(before, choose)])


def bipartite_soft_matching(states: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Merge states (n, width) into `number` states; return the remaining indices and the states.

    In every round, each token at an even index is matched with the most similar (cosine) token at an odd
    index. The most similar pairs are replaced by their mean, weighted by the number of original tokens.
    """
    number = max(number, min(1, len(states)))  # at least one token remains, even at `keep: 0`
    places, size = torch.arange(len(states), device=states.device), states.new_ones(len(states))
    while len(states) > number:
        unit = F.normalize(states.detach().to(torch.promote_types(states.dtype, torch.float32)), dim=-1)
        best_match = (unit[::2] @ unit[1::2].T).max(1)  # over cosines (even token, odd token)
        # Merge at most half of the tokens per round: the `going` even tokens most similar to their match.
        going = min(len(states) - number, len(states) // 2)
        source = best_match.values.topk(going).indices
        target = best_match.indices[source] * 2 + 1
        source = source * 2
        # (s_a x_a + s_b x_b) / (s_a + s_b): the mean over all original tokens of the pair.
        weighted = states * size[:, None]
        weighted = weighted.index_add(0, target, weighted[source])
        size = size.index_add(0, target, size[source])
        left = torch.ones(len(states), dtype=torch.bool, device=states.device)
        left[source] = False
        states, size, places = (weighted / size[:, None])[left], size[left], places[left]
    return places, states
