"""Attention of visual tokens to their neighbours on the picture, in blocks of raster rows; no map of all
pairs."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.compression.pruning.patch_grid import pick
from mmrl.compression.pruning.token_stages import Stage

BLOCK = 96  # query tokens that are computed together, about: fewer waste the kernel, more waste the window


def block_rows(rows: int, columns: int) -> int:
    """Choose how many rows of a raster make a block: blocks are of one size, nearly."""
    blocks = max(1, -(-rows * columns // BLOCK))
    return -(-rows // min(rows, blocks))


def block_keys(rows: int, columns: int, radius: int, causal: bool) -> tuple[int, int, int]:
    """Count the blocks of a raster, and queries and visual keys of each."""
    block = block_rows(rows, columns)
    reach = min(radius, rows - 1)
    return -(-rows // block), block * columns, (block + reach * (1 if causal else 2)) * columns


@lru_cache(maxsize=64)
def _near(rows: int, columns: int, radius: int, causal: bool) -> Tensor:
    """Tell which keys of its block a query is near to: (blocks, queries, keys)."""
    block, reach = block_rows(rows, columns), min(radius, rows - 1)
    blocks, queries, keys = block_keys(rows, columns, radius, causal)
    start = torch.arange(blocks)[:, None] * block
    qy = (start + torch.arange(queries) // columns)[:, :, None]
    ky = (start - reach + torch.arange(keys) // columns)[:, None]
    qx, kx = (torch.arange(n) % columns for n in (queries, keys))
    qx, kx = qx[None, :, None], kx[None, None]
    near = ((qy - ky).abs() <= radius) & ((qx - kx).abs() <= radius) & (ky >= 0) & (ky < rows)
    if causal:
        near &= ky * columns + kx <= qy * columns + qx
    # Rows that fill up the last block see what they like; nobody reads them.
    return near | (qy >= rows)


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, text_k: Tensor, text_v: Tensor, stage: Stage, *,
    radius: int, causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Let visual rows (B, H, n_v, D) attend to their neighbours and to the text before them.

    `k` and `v` are of the same rows; `text_k` and `text_v` (B, H, t, D) of the text that `stage.words` lists.
    Every raster must be whole.
    """
    batch, heads, n, size = q.shape
    out = q.new_zeros(batch * n, heads, size)
    flat = [x.transpose(1, 2).reshape(batch * n, heads, size) for x in (q, k, v)]
    for (rows, columns), at in raster_rows(stage).items():
        owner = at[:, 0] // n
        whole = at.numel() == batch * n and bool(
            (at.flatten() == torch.arange(batch * n, device=at.device)).all()
        )
        mine = [x.view(*at.shape, heads, size) if whole else x[at] for x in flat]
        text = [x[owner] for x in (text_k, text_v)]
        name = ("blocks", rows, columns, radius, causal)
        make = lambda at=at, shape=(rows, columns): _block_mask(stage, at, shape, radius, causal)
        done = _blocks(mine, text, stage.bias(name, make, q.dtype), (rows, columns), radius, causal, scale)
        if whole:
            return done.reshape(batch, n, heads, size).transpose(1, 2)
        out = out.index_copy(0, at.flatten(), done.flatten(0, 1))
    return out.view(batch, n, heads, size).transpose(1, 2)


def raster_rows(stage: Stage) -> dict[tuple[int, int], Tensor]:
    """Find the visual rows of every raster, by shape: (F, h * w) flat indices `b * n_v + j`."""
    batch, n = stage.vis.shape
    size = stage.layout.visual.shape[1]
    rows = torch.arange(batch * n, device=stage.vis.device).view(batch, n)
    place = rows.new_full((batch, size + 1), -1)
    place.scatter_(1, stage.vis.masked_fill(stage.vis < 0, size), rows)
    place = place[:, :size].flatten()
    return {shape: place[at] for shape, at in stage.layout.rasters.items()}


def _blocks(
    mine: list[Tensor], text: list[Tensor], bias: Tensor, shape: tuple[int, int], radius: int, causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend within rasters (F, h * w, H, D), block by block."""
    (rows, columns), (frames, _, heads, size) = shape, mine[0].shape
    block, reach = block_rows(rows, columns), min(radius, rows - 1)
    blocks = -(-rows // block)
    below, fill = (0 if causal else reach), blocks * block - rows
    q = _pad_rows(mine[0], columns, 0, fill).view(frames, blocks, block * columns, heads, size)
    keys = []
    for x, words in zip(mine[1:], text, strict=True):
        lines = _pad_rows(x, columns, reach, fill + below).view(frames, -1, columns, heads, size)
        parts = lines.unfold(1, block + reach + below, block)  # (F, blocks, w, H, D, lines of a block)
        parts = parts.permute(0, 1, 3, 5, 2, 4).flatten(3, 4)
        parts = torch.cat([parts, words[:, None].expand(-1, blocks, -1, -1, -1)], 3)
        keys.append(parts.flatten(0, 1))
    out = F.scaled_dot_product_attention(q.flatten(0, 1).transpose(1, 2), *keys, attn_mask=bias, scale=scale)
    return out.transpose(1, 2).reshape(frames, blocks * block * columns, heads, size)[:, : rows * columns]


def _block_mask(stage: Stage, at: Tensor, shape: tuple[int, int], radius: int, causal: bool) -> Tensor:
    """Tell what the queries of every block see, neighbours and then text: (F * blocks, 1, queries, keys +
    t)."""
    rows, columns = shape
    blocks, queries, _ = block_keys(rows, columns, radius, causal)
    near = _near(rows, columns, radius, causal).to(at.device).expand(len(at), -1, -1, -1)
    before = stage.words[1].flatten(0, 1)[at]
    before = F.pad(before, (0, 0, 0, blocks * queries - rows * columns))
    seen = before.view(len(at), blocks, queries, before.shape[-1])
    return torch.cat([near, seen], -1).flatten(0, 1)[:, None]


def _pad_rows(x: Tensor, columns: int, above: int, below: int) -> Tensor:
    """Put empty raster rows above and below."""
    return F.pad(x, (0, 0, 0, 0, above * columns, below * columns)) if above or below else x


def near_mask(stage: Stage, radius: int, causal: bool) -> Tensor:
    """Tell which columns visual rows see, as one mask (B, 1, n_v, C): for rasters that are no longer whole,
    and what the blocks are tested against."""
    place = stage.layout.place
    rows = [pick(axis, stage.vis) for axis in place]
    cols = [pick(axis, stage.cols) for axis in place]
    near = (rows[0][:, :, None] == cols[0][:, None]) & (rows[0] >= 0)[:, :, None]
    for line, column in zip(rows[1:], cols[1:], strict=True):
        near &= (line[:, :, None] - column[:, None]).abs() <= radius
    past = stage.orig.shape[1] - stage.cols.shape[1]
    near = F.pad(near, (past, 0)) & stage.visual[:, None] & stage.seen[:, None]
    base = stage.mask(stage.vis)[:, 0]
    see = (base & ~stage.visual[:, None]) | (near & base if causal else near)
    return (see | ~see.any(-1, keepdim=True))[:, None]
