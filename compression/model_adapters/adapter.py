"""Adapter of a model family for visual-token pruning: patch grids, projections, positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.pruning.sliced_linear import FeatureIndex, sliced_linear

PatchGrids = list[tuple[int, int]]  # (rows, columns) of every image or frame, in token order


@dataclass(frozen=True)
class ModelAdapter:
    """Patch grids, attention projections and position ids of a model family.

    `grids(core, inputs)` maps placeholder token ids to the patch grids of the media in the batch; empty if
    unknown. `class_token_attention(core)` returns the attention module in the vision tower whose class token
    ranks patches (VisionZip), if there is one.
    """

    grids: Callable[[nn.Module, Mapping[str, Any]], dict[int, PatchGrids]]
    class_token_attention: Callable[[nn.Module], nn.Module] | None = None
    grids_need_media: bool = False  # whether grids can be computed only while media are encoded
    multimodal_positions: bool = False  # M-RoPE: position ids (time, height, width) per token
    head_norm: bool = False  # queries and keys are normalised per head, as in Qwen3

    def project(
        self, attn: nn.Module, x: Tensor, queries: FeatureIndex = None, keys: FeatureIndex = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project states (B, n, width) to queries, keys and values, before rotary embedding.

        Each result is (B, heads, n, D) and contains only the chosen features; None means all features.
        """
        chosen = ((attn.q_proj, queries), (attn.k_proj, keys), (attn.v_proj, keys))
        q, k, v = (
            sliced_linear(linear, x, rows=rows).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for linear, rows in chosen
        )
        return (attn.q_norm(q), attn.k_norm(k), v) if self.head_norm else (q, k, v)

    def positions(self, ids: Tensor, batch: int) -> Tensor:
        """Expand `position_ids` to all rows, shaped for `rotary_emb`: (B, n), or (3, B, n) for M-RoPE."""
        if not self.multimodal_positions:
            return ids.expand(batch, -1)
        ids = ids if ids.dim() == 3 else ids[None]
        return ids[-3:].expand(3, batch, -1)  # drop the axis of text positions, if there are four axes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to queries or keys (B, H, n, D); `cos` and `sin` are (B, n, D)."""
    # Maps (x1, x2) to (x1 cos - x2 sin, x2 cos + x1 sin), in the projection's memory layout (B, n, H, D),
    # to avoid a copy.
    x, cos, sin = x.transpose(1, 2), cos[:, :, None], sin[:, :, None]
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = (
        torch.addcmul(first * cos[..., :half], second, sin[..., :half], value=-1),
        torch.addcmul(second * cos[..., half:], first, sin[..., half:]),
    )
    return torch.cat(turned, -1).transpose(1, 2)
