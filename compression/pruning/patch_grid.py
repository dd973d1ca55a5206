"""Places of visual tokens in the sequence of a call and on the patch grids of their images."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.adapter import ModelAdapter, PatchGrids, placeholders
from mmrl.compression.pruning.vision_tower import KINDS, encoded_grids, recorded_tower

NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Visual tokens of one call: `visual` (B, S) marks placeholders of images and frames.

    `grids` holds, by shape (h, w), the flat indices `b * S + s` of every patch grid, (F, h * w) in reading
    order. `place` (3, B, S) is the number of the grid, the row and the column; -1 for text. `tower` are
    queries and keys recorded in the vision tower.
    """

    visual: Tensor
    grids: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    place: Tensor | None = None
    tower: Mapping[str, Tensor] = field(default_factory=dict)


LAYOUT: ContextVar[TokenLayout | None] = ContextVar("layout", default=None)


def lay_out(core: nn.Module, adapter: ModelAdapter, inputs: Mapping[str, Any], *, grids: bool) -> TokenLayout:
    """Find the visual tokens of a call, and with `grids` the place of each on its patch grid."""
    ids = inputs.get("input_ids")
    if ids is None:
        raise ValueError(
            "a pruned model finds visual tokens by their placeholders, so it needs `input_ids`; "
            "`inputs_embeds` alone do not mark them"
        )
    visual = torch.zeros_like(ids, dtype=torch.bool)
    for token in placeholders(core.config):
        visual |= ids == token
    tower = recorded_tower(inputs)
    if not grids or not bool(visual.any()):
        return TokenLayout(visual, tower=tower)
    known = adapter.grids(core, inputs)
    for kind in KINDS:
        known.setdefault(getattr(core.config, f"{kind}_token_id", None), encoded_grids(inputs, kind))
    found: dict[tuple[int, int], list[Tensor]] = {}
    place = torch.full((3, *ids.shape), NO_TOKEN, device=ids.device)
    number = 0
    for token in placeholders(core.config):
        at = (ids == token).flatten().nonzero()[:, 0]
        number = _assign(at, known.get(token, []), found, place.view(3, -1), number, token)
    return TokenLayout(visual, {shape: torch.stack(many) for shape, many in found.items()}, place, tower)


def _assign(at: Tensor, grids: PatchGrids, found: dict, place: Tensor, number: int, token: int) -> int:
    """Assign the places of one kind of token to its patch grids; returns the number of the next grid."""
    wanted = sum(h * w for h, w in grids)
    if wanted != len(at):
        raise ValueError(
            f"{len(at)} placeholder tokens ({token}) for patch grids of {wanted} visual tokens; "
            "`local_visual_attention` needs the images (or their grids) in the call that holds their "
            "placeholders"
        )
    start = 0
    for h, w in grids:
        mine = at[start : start + h * w]
        found.setdefault((h, w), []).append(mine)
        cell = torch.arange(h * w, device=at.device)
        place[:, mine] = torch.stack([torch.full_like(cell, number), cell // w, cell % w])
        start, number = start + h * w, number + 1
    return number


def pack_places(flags: Tensor) -> Tensor:
    """List the indices where `flags` (B, S) is True, in order, padded on the left with -1: (B, n)."""
    n = int(flags.sum(1).max())
    order = torch.sort(flags.to(torch.uint8), dim=1, stable=True).indices[:, flags.shape[1] - n :]
    return order.masked_fill(~flags.gather(1, order), NO_TOKEN)


def pick(x: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """Gather the entries `index` (B, n) along `dim` of `x` (B, ...); padding (-1) gathers entry 0."""
    if x.shape[dim] == index.shape[1] and _is_range(index):
        return x
    index = index.clamp(min=0)
    if x.shape[0] == 1:
        return x.index_select(dim, index[0])
    rows = torch.arange(len(index), device=index.device)[:, None]
    return x[rows, index] if dim == 1 else x.transpose(1, dim)[rows, index].transpose(1, dim)


def _is_range(index: Tensor) -> bool:
    return bool((index == torch.arange(index.shape[1], device=index.device)).all())
