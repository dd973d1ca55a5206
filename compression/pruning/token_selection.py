"""Which visual tokens stay: by the attention they get, by what the tower looks at, by how they differ; and
merging."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.compression.pruning.forward import Choice, Scene


def best(scores: Tensor, there: Tensor, numbers: Tensor) -> Tensor:
    """Mark the `numbers` (B,) best of scores (B, n) among those `there`; the earlier of equals."""
    ranked = scores.masked_fill(~there, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(ranked).scatter_(
        1, ranked, torch.arange(ranked.shape[1]).to(ranked).expand_as(ranked)
    )
    return there & (place < numbers[:, None])


def most_seen(scene: Scene, *, keep: float) -> Choice:
    """Keep the share that the last text token paid most attention to, in the layer before (FastV)."""
    _refuse_packed(scene)
    numbers = (scene.there.sum(1) * keep).round().long()
    return Choice(best(scene.seen, scene.there, numbers))


def most_ranked(scene: Scene, *, keep: float) -> Choice:
    """Keep the share, of all visual tokens there were, that the last text token pays most attention to with
    this layer's projections (PyramidDrop)."""
    _refuse_packed(scene)
    numbers = (scene.stage.layout.visual.sum(1) * keep).long()
    return Choice(best(scene.rank(), scene.there, numbers))


def _refuse_packed(scene: Scene) -> None:
    if scene.stage.allowed is not None:
        raise ValueError(
            "visual tokens that are ranked by the last token of the prompt need a call that ends with it; "
            "here answers are packed behind the prompt under one mask. Set `gradient_checkpointing: false`"
        )


def most_diverse(scene: Scene, *, keep: float) -> Choice:
    """Keep a share whose smallest distance to each other is large, greedily; distance is 1 - cosine
    (DivPrune)."""
    kept = torch.zeros_like(scene.there)
    for row, states in enumerate(scene.vis.detach()):
        at = scene.there[row].nonzero()[:, 0]
        kept[row, at[spread_out(states[at], round(keep * len(at)))]] = True
    return Choice(kept)


def spread_out(states: Tensor, number: int) -> Tensor:
    """Choose `number` of (n, width) states: first the one whose nearest neighbour is farthest, then always
    the one farthest from those chosen."""
    if number >= len(states):
        return torch.arange(len(states), device=states.device)
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


def tower_choice(scene: Scene, *, dominant: int, contextual: int, heads: int) -> Choice:
    """Keep, of every picture, the patches that the tower's class token looks at most, and targets evenly
    spaced among the rest, to which the others are added as a mean (VisionZip)."""
    if not scene.stage.layout.tower:
        raise ValueError(
            "`vision_zip` ranks patches while the pruned model encodes them; give pixels, or features that "
            "it encoded"
        )
    q, k = (scene.stage.layout.tower[name].unflatten(-1, (heads, -1)) for name in ("q", "k"))
    score = torch.einsum("fhd,fnhd->fhn", q[:, 0], k) * q.shape[-1] ** -0.5
    seen = score.float().softmax(-1).sum(1)[:, 1:]  # the class token itself is no patch
    keys = F.normalize(k[:, 1:].mean(2).float(), dim=-1)
    pictures, patches = seen.shape
    if pictures * patches != int(scene.there.sum()):
        raise ValueError(
            f"the tower saw {pictures} pictures of {patches} patches for {int(scene.there.sum())} visual "
            "tokens; pictures and placeholders must come in one call"
        )
    kept, vis = torch.zeros_like(scene.there), scene.vis
    flat = scene.there.nonzero()  # (pictures * patches, 2), in the order of the pictures
    states = vis[scene.there].view(pictures, patches, -1)
    stay, changed = zip(
        *(_zip_one(states[f], seen[f], keys[f], dominant, contextual) for f in range(pictures)), strict=True
    )
    kept[flat[:, 0], flat[:, 1]] = torch.cat(stay)
    return Choice(kept, vis.index_put((flat[:, 0], flat[:, 1]), torch.cat(changed)))


def _zip_one(
    states: Tensor, seen: Tensor, keys: Tensor, dominant: int, contextual: int
) -> tuple[Tensor, Tensor]:
    """Choose the patches of one picture (n, width): which stay, and the states with means added."""
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


def merged(scene: Scene, *, keep: float) -> Choice:
    """Merge tokens that are alike until a share is left (token merging)."""
    kept, vis = torch.zeros_like(scene.there), scene.vis
    rows = []
    for row, states in enumerate(vis):
        at = scene.there[row].nonzero()[:, 0]
        left, means = merge_alike(states[at], round(keep * len(at)))
        kept[row, at[left]] = True
        rows.append(states.index_copy(0, at[left], means))
    return Choice(kept, torch.stack(rows))


def merge_alike(states: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Merge (n, width) states into `number`: which places are left, and the means that stand there.

    In every round every second token looks for the most alike (cosine) of the others, and the closest pairs
    become their mean, weighed by how many tokens each stands for.
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
        weighed = states * size[:, None]
        weighed = weighed.index_add(0, target, weighed[source])
        size = size.index_add(0, target, size[source])
        left = torch.ones(len(states), dtype=torch.bool, device=states.device)
        left[source] = False
        states, size, places = (weighed / size[:, None])[left], size[left], places[left]
    return places, states


def stage_layers(layers: int, stages: int) -> Sequence[int]:
    """Part layers evenly, and name the first of every stage but the first."""
    return tuple(layers * (i + 1) // stages for i in range(stages - 1))
