"""Visual tokens of a call: their positions in the sequence and on the patch grids of their images.

`generate` encodes images first and then passes their features (repeated for beams) without the grids.
So the grids, and the vision tower's queries and keys, are attached to the feature tensors as attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.families import adapter_of
from mmrl.compression.pruning.spec import pruning_of
from mmrl.kv_cache.layout import placeholder_ids, placeholders

NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Visual tokens of a call, B rows of S tokens; `visual` (B, S) marks image and frame placeholders.

    `grids` maps a shape (h, w) to the flat indices `b * S + s` of the tokens in F such patch grids, (F, h *
    w), in reading order. `place` (3, B, S) holds the number of the grid, the row and the column of each
    token; -1 for text. `tower` holds queries and keys of the vision tower: (images, class token + patches,
    width).
    """

    visual: Tensor
    grids: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    place: Tensor | None = None
    tower: Mapping[str, Tensor] = field(default_factory=dict)


LAYOUT: ContextVar[TokenLayout | None] = ContextVar("layout", default=None)


def lay_out(core: nn.Module, inputs: Mapping[str, Any], *, grids: bool) -> TokenLayout:
    """Find the visual tokens of a forward pass, and with `grids` their positions on patch grids."""
    ids = inputs.get("input_ids")
    if ids is None:
        raise ValueError(
            "a pruned model finds visual tokens by their placeholders, so it needs `input_ids`; "
            "`inputs_embeds` alone do not mark them"
        )
    encoded = inputs.get("mm_encoder_outputs") or {}
    features = {kind: out.pooler_output for kind, out in encoded.items() if out is not None}
    visual = torch.isin(ids, ids.new_tensor(placeholder_ids(core.config)))
    tower = [getattr(feature, "tower", {}) for feature in features.get("image", ())]
    tower = {name: torch.stack([part[name] for part in tower]) for name in (tower[0] if tower else ())}
    if not grids or not bool(visual.any()):
        return TokenLayout(visual, tower=tower)
    grids_by_token, tokens = adapter_of(core).grids(core, inputs), placeholders(core.config)
    for kind, encodings in features.items():
        attached = [grid for feature in encodings for grid in getattr(feature, "grids", ())]
        grids_by_token.setdefault(tokens[kind], attached)
    place, number = torch.full((3, ids.numel()), NO_TOKEN, device=ids.device), 0
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for token in placeholder_ids(core.config):
        shapes, at = grids_by_token.get(token, []), (ids == token).flatten().nonzero()[:, 0]
        wanted = [h * w for h, w in shapes]
        if sum(wanted) != len(at):
            raise ValueError(
                f"{len(at)} placeholder tokens ({token}) for patch grids of {sum(wanted)} visual tokens; "
                "`local_visual_attention` needs the images (or their grids) in the call that holds their "
                "placeholders"
            )
        for (h, w), cells in zip(shapes, at.split(wanted), strict=True):
            by_shape.setdefault((h, w), []).append(cells)
            cell = torch.arange(h * w, device=at.device)  # reading order: row by row
            place[:, cells] = torch.stack([torch.full_like(cell, number), cell // w, cell % w])
            number += 1
    stacked = {shape: torch.stack(cells) for shape, cells in by_shape.items()}  # (F, h * w)
    return TokenLayout(visual, stacked, place.view(3, *ids.shape), tower)


def forward_features(core: nn.Module, kind: str, method: Callable, *args: Any, **kwargs: Any) -> Any:
    """Encode images or videos with `method`; attach patch grids and vision-tower states to the features."""
    adapter, tower, hooks = adapter_of(core), {}, []
    if kind == "image" and pruning_of(core).tower:
        attn = adapter.class_token_attention(core)
        hooks = [  # record queries and keys, because sdpa returns no attention weights
            projection.register_forward_hook(lambda module, args, out, name=name: tower.update({name: out}))
            for name, projection in (("q", attn.q_proj), ("k", attn.k_proj))
        ]
    try:
        out = method(core, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if torch.is_tensor(out.pooler_output):  # one tensor, not a list: its shape tells the grids
        return out
    grids = iter(())
    if adapter.grids_need_media:
        bound = inspect.signature(method).bind(core, *args, **kwargs).arguments
        inputs = {**bound, **bound.get("kwargs", {})}
        grids = iter(adapter.grids(core, inputs).get(placeholders(core.config)[kind], ()))
    for number, feature in enumerate(out.pooler_output):
        feature.grids, left = [], len(feature)
        while left > 0 and (grid := next(grids, None)) is not None:
            feature.grids.append(grid)
            left -= grid[0] * grid[1]  # features of several tiles or frames have several grids
        feature.tower = {name: value[number] for name, value in tower.items()}
    return out


def encode_ahead(core: nn.Module, inputs: dict[str, Any]) -> None:
    """Encode images before the forward pass, as `generate` does, so that it gets the tower's states, too."""
    if inputs.get("pixel_values") is None:
        return
    wanted = inspect.signature(core.get_image_features).parameters
    arguments = {name: inputs.pop(name) for name in list(inputs) if name in wanted and name != "return_dict"}
    inputs["mm_encoder_outputs"] = {"image": core.get_image_features(**arguments, return_dict=True)}


def pack_places(flags: Tensor) -> Tensor:
    """Return the indices at which `flags` (B, S) is True, in order, padded on the left with -1: (B, n)."""
    n = int(flags.sum(1).max())
    # A stable sort puts False before True, and preserves the order of the indices of each.
    order = torch.sort(flags.to(torch.uint8), dim=1, stable=True).indices[:, flags.shape[1] - n :]
    return order.masked_fill(~flags.gather(1, order), NO_TOKEN)


def pick(x: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """Gather the entries `index` (B, n) along `dim` of `x` (B, ...); padding (-1) gathers entry 0."""
    n = index.shape[1]
    # The index is often the identity, and a comparison is cheaper than a copy.
    if x.shape[dim] == n and bool((index == torch.arange(n, device=index.device)).all()):
        return x
    index = index.clamp(min=0)
    if x.shape[0] == 1:
        return x.index_select(dim, index[0])
    rows = torch.arange(len(index), device=index.device)[:, None]
    return x[rows, index] if dim == 1 else x.transpose(1, dim)[rows, index].transpose(1, dim)
