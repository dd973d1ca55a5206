"""Selection and merging of visual tokens: FastV, PyramidDrop, DivPrune, VisionZip, ToMe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.compression.pruning.forward import Selection, SelectionContext


def top_mask(scores: Tensor, is_token: Tensor, numbers: Tensor) -> Tensor:
    """Mark the `numbers` (B,) highest scores (B, n) among real tokens; ties go to the earlier one."""
    ranked = scores.masked_fill(~is_token, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(ranked).scatter_(
        1, ranked, torch.arange(ranked.shape[1]).to(ranked).expand_as(ranked)
    )
    return is_token & (place < numbers[:, None])


def fastv_selection(scene: SelectionContext, *, keep: float) -> Selection:
    """Keep the share with the most attention from the last text token in the previous layer (FastV)."""
    _check_ends_with_prompt(scene)
    numbers = (scene.is_token.sum(1) * keep).round().long()
    return Selection(top_mask(scene.seen, scene.is_token, numbers))


def pyramid_drop_selection(scene: SelectionContext, *, keep: float) -> Selection:
    """Keep the share of all visual tokens with the most attention in this layer (PyramidDrop)."""
    _check_ends_with_prompt(scene)
    numbers = (scene.stage.layout.visual.sum(1) * keep).long()
    return Selection(top_mask(scene.rank(), scene.is_token, numbers))


def _check_ends_with_prompt(scene: SelectionContext) -> None:
    if scene.stage.allowed is not None:
        raise ValueError(
            "ranking visual tokens by the last token of the prompt needs a call that ends with it, but "
            "answers are packed after the prompt under one mask. Set `gradient_checkpointing: false`"
        )


def div_prune_selection(scene: SelectionContext, *, keep: float) -> Selection:
    """Keep the share that greedily maximises the smallest pairwise distance, 1 - cosine (DivPrune)."""
    kept = torch.zeros_like(scene.is_token)
    for row, states in enumerate(scene.vis.detach()):
        at = scene.is_token[row].nonzero()[:, 0]
        kept[row, at[max_min_diversity(states[at], round(keep * len(at)))]] = True
    return Selection(kept)


def max_min_diversity(states: Tensor, number: int) -> Tensor:
    """Choose `number` of (n, width) states by greedy max-min distance.

    First the state whose nearest neighbour is farthest, then always the one farthest from those chosen.
    """
    if number >= len(states):
        return torch.arange(len(states), device=states.device)
    # Distances between unit vectors: 1 - cosine; the diagonal is excluded from the nearest neighbours.
    unit = F.normalize(states.to(torch.promote_types(states.dtype, torch.float32)), dim=-1)
    far = 1 - unit @ unit.T
    apart = far.clone().fill_diagonal_(float("inf"))
    chosen = [int(apart.min(1).values.argmax())] if number else []
    nearest = far[chosen[0]].clone() if number else None
    while len(chosen) < number:
        nearest[chosen[-1]] = float("-inf")
        chosen.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, far[chosen[-1]])
    return torch.tensor(chosen, dtype=torch.int64, device=states.device)


def vision_zip_selection(scene: SelectionContext, *, dominant: int, contextual: int, heads: int) -> Selection:
    """Keep dominant patches and merge the rest into evenly spaced ones (VisionZip)."""
    if not scene.stage.layout.tower:
        raise ValueError(
            "`vision_zip` ranks patches while the pruned model encodes them; pass pixels, or features that "
            "it encoded"
        )
    q, k = (scene.stage.layout.tower[name].unflatten(-1, (heads, -1)) for name in ("q", "k"))
    # Attention of the class token (query 0) of every head, summed over heads.
    score = torch.einsum("fhd,fnhd->fhn", q[:, 0], k) * q.shape[-1] ** -0.5
    seen = score.float().softmax(-1).sum(1)[:, 1:]  # the class token itself is no patch
    keys = F.normalize(k[:, 1:].mean(2).float(), dim=-1)
    images, patches = seen.shape
    if images * patches != int(scene.is_token.sum()):
        raise ValueError(
            f"the tower saw {images} images of {patches} patches for {int(scene.is_token.sum())} visual "
            "tokens; images and placeholders must be passed in one call"
        )
    kept, vis = torch.zeros_like(scene.is_token), scene.vis
    flat = scene.is_token.nonzero()  # (images * patches, 2), in the order of the images
    states = vis[scene.is_token].view(images, patches, -1)
    stay, changed = zip(
        *(vision_zip_image(states[f], seen[f], keys[f], dominant, contextual) for f in range(images)),
        strict=True,
    )
    kept[flat[:, 0], flat[:, 1]] = torch.cat(stay)
    return Selection(kept, vis.index_put((flat[:, 0], flat[:, 1]), torch.cat(changed)))


def vision_zip_image(
    states: Tensor, seen: Tensor, keys: Tensor, dominant: int, contextual: int
) -> tuple[Tensor, Tensor]:
    """Select the patches of one image (n, width): a mask of those kept, and the states with means added."""
    n = len(states)
    stay = torch.zeros(n, dtype=torch.bool, device=states.device)
    stay[seen.topk(min(dominant, n)).indices] = True
    rest = (~stay).nonzero()[:, 0]
    number = min(contextual, len(rest))
    if not number:
        return stay, states
    targets = rest[torch.arange(0, len(rest), max(1, len(rest) // number))[:number]]
    stay[targets] = True
    others = rest[~torch.isin(rest, targets)]
    nearest = (keys[others] @ keys[targets].T).argmax(1)
    total = states.new_zeros(number, states.shape[1]).index_add(0, nearest, states[others])
    count = torch.bincount(nearest, minlength=number).clamp(min=1)[:, None]
    return stay, states.index_add(0, targets, total / count)


def tome_selection(scene: SelectionContext, *, keep: float) -> Selection:
    """Merge similar tokens until a share is left (ToMe)."""
    kept, vis = torch.zeros_like(scene.is_token), scene.vis
    rows = []
    for row, states in enumerate(vis):
        at = scene.is_token[row].nonzero()[:, 0]
        left, means = bipartite_soft_matching(states[at], round(keep * len(at)))
        kept[row, at[left]] = True
        rows.append(states.index_copy(0, at[left], means))
    return Selection(kept, torch.stack(rows))


def bipartite_soft_matching(states: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Merge (n, width) states into `number`; returns the indices of those left, and their means.

    In every round each even token is matched with the most similar (cosine) odd one, and the closest pairs
    become their mean, weighted by the number of tokens that each stands for.
    """
    number = max(number, min(1, len(states)))
    places, size = torch.arange(len(states), device=states.device), states.new_ones(len(states))
    while len(states) > number:
        unit = F.normalize(states.detach().to(torch.promote_types(states.dtype, torch.float32)), dim=-1)
        best_match = (unit[::2] @ unit[1::2].T).max(1)
        going = min(len(states) - number, len(unit[::2]), len(states) // 2)
        source = best_match.values.topk(going).indices
        target = best_match.indices[source] * 2 + 1
        source = source * 2
        # (s_a x_a + s_b x_b) / (s_a + s_b): the mean of all original tokens of both.
        weighed = states * size[:, None]
        weighed = weighed.index_add(0, target, weighed[source])
        size = size.index_add(0, target, size[source])
        left = torch.ones(len(states), dtype=torch.bool, device=states.device)
        left[source] = False
        states, size, places = (weighed / size[:, None])[left], size[left], places[left]
    return places, states


def stage_layers(layers: int, stages: int) -> Sequence[int]:
    """Split layers into equal stages; returns the first layer of every stage but the first."""
    return tuple(layers * (i + 1) // stages for i in range(stages - 1))
