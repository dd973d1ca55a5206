"""Where the visual tokens of a call are, and where on their pictures."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.adapter import Decoder, Rasters, placeholders
from mmrl.compression.pruning.vision_tower import KINDS, noted_rasters, noted_tower

NOWHERE = -1


@dataclass(frozen=True, eq=False)
class Layout:
    """The tokens of one call: `visual` (B, S) marks placeholders of pictures and frames.

    `rasters` holds, by shape (h, w), the flat indices `b * S + s` of every raster, (F, h * w) in reading
    order. `place` (3, B, S) is the number of the raster, the row and the column; -1 where there is none.
    `tower` are tensors that were taken down in the vision tower.
    """

    visual: Tensor
    rasters: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    place: Tensor | None = None
    tower: Mapping[str, Tensor] = field(default_factory=dict)


LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)


def lay_out(core: nn.Module, decoder: Decoder, inputs: Mapping[str, Any], *, rasters: bool) -> Layout:
    """Find the visual tokens of a call, and with `rasters` where each stands on its picture."""
    ids = inputs.get("input_ids")
    if ids is None:
        raise ValueError(
            "a pruned model finds visual tokens by their placeholders, so it needs `input_ids`; "
            "`inputs_embeds` alone do not tell"
        )
    visual = torch.zeros_like(ids, dtype=torch.bool)
    for token in placeholders(core.config):
        visual |= ids == token
    tower = noted_tower(inputs)
    if not rasters or not bool(visual.any()):
        return Layout(visual, tower=tower)
    known = decoder.rasters(core, inputs)
    for kind in KINDS:
        known.setdefault(getattr(core.config, f"{kind}_token_id", None), noted_rasters(inputs, kind))
    found: dict[tuple[int, int], list[Tensor]] = {}
    place = torch.full((3, *ids.shape), NOWHERE, device=ids.device)
    number = 0
    for token in placeholders(core.config):
        at = (ids == token).flatten().nonzero()[:, 0]
        number = _lay(at, known.get(token, []), found, place.view(3, -1), number, token)
    return Layout(visual, {shape: torch.stack(many) for shape, many in found.items()}, place, tower)


def _lay(at: Tensor, rasters: Rasters, found: dict, place: Tensor, number: int, token: int) -> int:
    """Part the places of one kind of token among its rasters; gives the number of the next raster."""
    wanted = sum(h * w for h, w in rasters)
    if wanted != len(at):
        raise ValueError(
            f"{len(at)} placeholder tokens ({token}) for rasters of {wanted} visual tokens; "
            "`local_visual_attention` needs the pictures (or their grids) in the call that holds their "
            "placeholders"
        )
    start = 0
    for h, w in rasters:
        mine = at[start : start + h * w]
        found.setdefault((h, w), []).append(mine)
        cell = torch.arange(h * w, device=at.device)
        place[:, mine] = torch.stack([torch.full_like(cell, number), cell // w, cell % w])
        start, number = start + h * w, number + 1
    return number


def pack_places(flags: Tensor) -> Tensor:
    """List where `flags` (B, S) are True, in order, padded on the left with -1: (B, n)."""
    n = int(flags.sum(1).max())
    order = torch.sort(flags.to(torch.uint8), dim=1, stable=True).indices[:, flags.shape[1] - n :]
    return order.masked_fill(~flags.gather(1, order), NOWHERE)


def pick(x: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """Take the rows that `index` (B, n) names along `dim` of `x` (B, ...); -1 takes any row."""
    if x.shape[dim] == index.shape[1] and _is_range(index):
        return x
    index = index.clamp(min=0)
    if x.shape[0] == 1:
        return x.index_select(dim, index[0])
    rows = torch.arange(len(index), device=index.device)[:, None]
    return x[rows, index] if dim == 1 else x.transpose(1, dim)[rows, index].transpose(1, dim)


def _is_range(index: Tensor) -> bool:
    return bool((index == torch.arange(index.shape[1], device=index.device)).all())
