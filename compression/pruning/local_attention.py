"""Windowed attention on patch grids, in blocks of grid rows, without a full attention map."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.compression.pruning.patch_grid import pick
from mmrl.compression.pruning.token_stages import TokenStage

BLOCK = 96  # target queries per block: smaller blocks underuse the kernel, larger ones mask more keys


def block_rows(rows: int, columns: int) -> int:
    """Choose the number of grid rows per block, so that blocks are of nearly equal size."""
    blocks = max(1, -(-rows * columns // BLOCK))
    return -(-rows // min(rows, blocks))


def block_keys(rows: int, columns: int, radius: int, causal: bool) -> tuple[int, int, int]:
    """Return the number of blocks of a grid, and of queries and visual keys per block."""
    block = block_rows(rows, columns)
    reach = min(radius, rows - 1)
    return -(-rows // block), block * columns, (block + reach * (1 if causal else 2)) * columns


@lru_cache(maxsize=64)
def _near(rows: int, columns: int, radius: int, causal: bool) -> Tensor:
    """Compute which keys of its block are in the window of a query: (blocks, queries, keys)."""
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
    # Padding rows of the last block attend everywhere, so that their softmax is defined; they are dropped.
    return near | (qy >= rows)


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, text_k: Tensor, text_v: Tensor, stage: TokenStage, *,
    radius: int, causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Attend from visual rows (B, H, n_v, D) to their window and to the text before them.

    `k` and `v` belong to the same rows; `text_k` and `text_v` (B, H, t, D) to the text of `stage.words`.
    Every grid must be complete.
    """
    batch, heads, n, size = q.shape
    out = q.new_zeros(batch * n, heads, size)
    flat = [x.transpose(1, 2).reshape(batch * n, heads, size) for x in (q, k, v)]
    for (rows, columns), at in grid_rows(stage).items():
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


def grid_rows(stage: TokenStage) -> dict[tuple[int, int], Tensor]:
    """Return the visual rows of every grid, by shape: (F, h * w) flat indices `b * n_v + j`."""
    batch, n = stage.vis.shape
    size = stage.layout.visual.shape[1]
    rows = torch.arange(batch * n, device=stage.vis.device).view(batch, n)
    place = rows.new_full((batch, size + 1), -1)
    place.scatter_(1, stage.vis.masked_fill(stage.vis < 0, size), rows)
    place = place[:, :size].flatten()
    return {shape: place[at] for shape, at in stage.layout.grids.items()}


def _blocks(
    mine: list[Tensor], text: list[Tensor], bias: Tensor, shape: tuple[int, int], radius: int, causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend within grids (F, h * w, H, D), block by block."""
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


def _block_mask(stage: TokenStage, at: Tensor, shape: tuple[int, int], radius: int, causal: bool) -> Tensor:
    """Compute the mask of every block over window and text: (F * blocks, 1, queries, keys + t)."""
    rows, columns = shape
    blocks, queries, _ = block_keys(rows, columns, radius, causal)
    near = _near(rows, columns, radius, causal).to(at.device).expand(len(at), -1, -1, -1)
    before = stage.words[1].flatten(0, 1)[at]
    before = F.pad(before, (0, 0, 0, blocks * queries - rows * columns))
    seen = before.view(len(at), blocks, queries, before.shape[-1])
    return torch.cat([near, seen], -1).flatten(0, 1)[:, None]


def _pad_rows(x: Tensor, columns: int, above: int, below: int) -> Tensor:
    """Pad with empty grid rows above and below."""
    return F.pad(x, (0, 0, 0, 0, above * columns, below * columns)) if above or below else x


def near_mask(stage: TokenStage, radius: int, causal: bool) -> Tensor:
    """Compute the window mask of visual rows over all columns: (B, 1, n_v, C).

    For grids that lost tokens to a reduction; tests compare the blocks with it.
    """
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
