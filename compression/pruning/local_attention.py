"""Windowed attention on patch grids, computed in blocks of grid rows without a full attention matrix."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.compression.pruning.patch_grid import pick
from mmrl.compression.pruning.spec import PruningSpec
from mmrl.compression.pruning.token_stages import TokenStage

BLOCK = 96  # queries per block: smaller blocks underuse the kernel, larger ones compute more masked keys


def block_rows(rows: int, columns: int) -> int:
    """Choose the number of grid rows per block such that all blocks have nearly equal size."""
    blocks = max(1, -(-rows * columns // BLOCK))  # the divisions in this function round up
    return -(-rows // min(rows, blocks))


def block_keys(rows: int, columns: int, radius: int, causal: bool) -> tuple[int, int, int]:
    """Return the number of blocks of a grid, and the numbers of queries and of visual keys per block."""
    block = block_rows(rows, columns)
    reach = min(radius, rows - 1)
    return -(-rows // block), block * columns, (block + reach * (1 if causal else 2)) * columns


@lru_cache(maxsize=64)
def _window(rows: int, columns: int, radius: int, causal: bool) -> Tensor:
    """Compute the mask (blocks, queries, keys) of the keys of a block that are in each query's window."""
    block, reach = block_rows(rows, columns), min(radius, rows - 1)
    blocks, queries, keys = block_keys(rows, columns, radius, causal)
    start = torch.arange(blocks)[:, None] * block  # the first grid row of every block
    qy = (start + torch.arange(queries) // columns)[:, :, None]
    ky = (start - reach + torch.arange(keys) // columns)[:, None]  # `reach` rows above the queries
    qx, kx = (torch.arange(n) % columns for n in (queries, keys))
    qx, kx = qx[None, :, None], kx[None, None]
    near = ((qy - ky).abs() <= radius) & ((qx - kx).abs() <= radius) & (ky >= 0) & (ky < rows)
    if causal:
        near &= ky * columns + kx <= qy * columns + qx
    # Padding queries of the last block attend to all keys, so that softmax is defined; results are unused.
    return near | (qy >= rows)


def attend_near(
    rows: tuple[Tensor, Tensor, Tensor], text: tuple[Tensor, Tensor], stage: TokenStage,
    pruning: PruningSpec, scale: float,
) -> Tensor:  # fmt: skip
    """Attend from visual tokens to their window and to the text before them; returns (B, H, n_v, D).

    `rows` holds the queries, keys and values of the visual tokens. `text` holds the keys and values (B, H, t,
    D) of the text tokens in the columns `stage.words`. The grids must be complete (no removed tokens).
    """
    batch, heads, n, size = rows[0].shape
    flat = [x.transpose(1, 2).reshape(batch * n, heads, size) for x in rows]
    out = flat[0].new_zeros(batch * n, heads, size)
    for shape, at, whole in stage.once("grids", lambda: _grid_rows(stage)):
        mine = [x.view(*at.shape, heads, size) if whole else x[at] for x in flat]
        before = [x[at[:, 0] // n] for x in text]  # each grid attends to the text of its own batch row
        make = lambda shape=shape, at=at: _block_mask(stage, shape, at, pruning)
        bias = stage.bias(("blocks", shape, pruning.radius, pruning.causal), make, flat[0].dtype)
        done = _attend_blocks(mine, before, bias, shape, pruning, scale)
        if whole:
            return done.reshape(batch, n, heads, size).transpose(1, 2)
        out = out.index_copy(0, at.flatten(), done.flatten(0, 1))
    return out.view(batch, n, heads, size).transpose(1, 2)


def _grid_rows(stage: TokenStage) -> list[tuple[tuple[int, int], Tensor, bool]]:
    """List (shape, flat token indices (F, h * w), whether these are all tokens in order) per grid shape."""
    batch, n = stage.vis.shape
    every = torch.arange(batch * n, device=stage.vis.device)
    place = (stage.inverse(stage.vis) + every[::n, None]).flatten()
    grids = [(shape, place[at]) for shape, at in stage.call.layout.grids.items()]
    return [
        (shape, at, at.numel() == batch * n and bool((at.flatten() == every).all())) for shape, at in grids
    ]


def _attend_blocks(
    rows: list[Tensor], text: list[Tensor], bias: Tensor, shape: tuple[int, int], pruning: PruningSpec,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend from F grids of equal shape to their windows and text, block by block: (F, h * w, H, D)."""
    (height, width), (frames, _, heads, size) = shape, rows[0].shape
    block, reach = block_rows(height, width), min(pruning.radius, height - 1)
    blocks = -(-height // block)
    below, fill = (0 if pruning.causal else reach), blocks * block - height
    q = _pad_rows(rows[0], width, 0, fill).view(frames * blocks, block * width, heads, size)
    keys = []
    for x, words in zip(rows[1:], text, strict=True):
        lines = _pad_rows(x, width, reach, fill + below).view(frames, -1, width, heads, size)
        # Blocks overlap by `reach` rows. (F, blocks, w, H, D, block rows) becomes (F, blocks, H, keys, D).
        parts = lines.unfold(1, block + reach + below, block).permute(0, 1, 3, 5, 2, 4).flatten(3, 4)
        parts = torch.cat([parts, words[:, None].expand(-1, blocks, -1, -1, -1)], 3)
        keys.append(parts.flatten(0, 1))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), *keys, attn_mask=bias, scale=scale)
    return out.transpose(1, 2).reshape(frames, -1, heads, size)[:, : height * width]


def _block_mask(stage: TokenStage, shape: tuple[int, int], at: Tensor, pruning: PruningSpec) -> Tensor:
    """Compute the masks (F * blocks, 1, queries, keys + t) of window and text for the blocks of F grids."""
    (height, width), frames = shape, len(at)
    near = _window(height, width, pruning.radius, pruning.causal).to(at.device).expand(frames, -1, -1, -1)
    _, blocks, queries, _ = near.shape
    before = stage.words[1].flatten(0, 1)[at]
    before = F.pad(before, (0, 0, 0, blocks * queries - height * width))
    return torch.cat([near, before.view(frames, blocks, queries, -1)], -1).flatten(0, 1)[:, None]


def _pad_rows(x: Tensor, columns: int, above: int, below: int) -> Tensor:
    """Pad a grid with empty rows: `above` rows before and `below` rows after it."""
    return F.pad(x, (0, 0, 0, 0, above * columns, below * columns)) if above or below else x


def window_mask(stage: TokenStage, pruning: PruningSpec) -> Tensor:
    """Compute the window mask (B, 1, n_v, C) of visual tokens over all C keys; grids may lack tokens."""
    rows, cols = (
        [pick(axis, index) for axis in stage.call.layout.place] for index in (stage.vis, stage.cols)
    )
    near = (rows[0][:, :, None] == cols[0][:, None]) & (rows[0] >= 0)[:, :, None]  # on the same patch grid
    for line, column in zip(rows[1:], cols[1:], strict=True):
        near &= (line[:, :, None] - column[:, None]).abs() <= pruning.radius
    past = stage.orig.shape[1] - stage.cols.shape[1]  # columns of earlier calls have no grid position
    near = F.pad(near, (past, 0)) & stage.visual[:, None] & stage.seen[:, None]
    base = stage.mask(stage.vis)[:, 0]
    see = (base & ~stage.visual[:, None]) | (near & base if pruning.causal else near)
    return (see | ~see.any(-1, keepdim=True))[:, None]
