"""The interface of a model family for pruned visual computation, and its common implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.pruning.sliced_linear import FeatureIndex, sliced_linear

PatchGrids = list[tuple[int, int]]  # (rows, columns) of every image or frame, in the order of their tokens


@dataclass(frozen=True)
class ModelAdapter:
    """Patch grids, attention projections and position ids of a model family.

    `grids(core, inputs)` returns, by placeholder token id, the patch grids of the media in the batch; empty
    if unknown. `project(attn, x, queries, keys)` returns queries, keys and values of (B, n, width) states,
    each (B, heads, n, D), before rotary embedding, of the chosen features only. `positions(ids, batch)`
    converts `position_ids` to the form that the model's `rotary_emb` takes. `class_token_attention(core)` is
    the attention module of the vision tower whose class token ranks patches (VisionZip), if there is one.
    `noted`: grids are known only when media are encoded, so the features carry them as an attribute.
    """

    grids: Callable[[nn.Module, Mapping[str, Any]], dict[int, PatchGrids]]
    project: Callable[[nn.Module, Tensor, FeatureIndex, FeatureIndex], tuple[Tensor, Tensor, Tensor]]
    positions: Callable[[Tensor, int], Tensor]
    class_token_attention: Callable[[nn.Module], nn.Module] | None = None
    noted: bool = False


def placeholders(config: Any) -> tuple[int, ...]:
    """List the placeholder token ids of images and videos."""
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")]
    return tuple(token for token in named if token is not None)


def heads(x: Tensor, size: int) -> Tensor:
    """Split the last axis into heads: (B, n, H * D) to (B, H, n, D)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def project(
    attn: nn.Module, x: Tensor, queries: FeatureIndex, keys: FeatureIndex
) -> tuple[Tensor, Tensor, Tensor]:
    """Project queries, keys and values as Llama, Qwen2 and Mistral do."""
    size = attn.head_dim
    return (
        heads(sliced_linear(attn.q_proj, x, rows=queries), size),
        heads(sliced_linear(attn.k_proj, x, rows=keys), size),
        heads(sliced_linear(attn.v_proj, x, rows=keys), size),
    )


def project_normed(
    attn: nn.Module, x: Tensor, queries: FeatureIndex, keys: FeatureIndex
) -> tuple[Tensor, Tensor, Tensor]:
    """Project queries, keys and values as Qwen3 does, which normalises every head."""
    q, k, v = project(attn, x, queries, keys)
    return attn.q_norm(q), attn.k_norm(k), v


def sequence_positions(ids: Tensor, batch: int) -> Tensor:
    """Expand one-dimensional positions to every row: (B, n)."""
    return ids.expand(batch, -1)


def multimodal_positions(ids: Tensor, batch: int) -> Tensor:
    """Expand M-RoPE positions to (3, B, n): time, height, width; a leading text axis is dropped."""
    ids = ids if ids.dim() == 3 else ids[None]
    return ids[-3:].expand(3, batch, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to queries or keys (B, H, n, D); `cos` and `sin` are (B, n, D)."""
    # (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin). Computed as (B, n, H, D), the memory layout of
    # the projection, so that nothing is copied first.
    x, cos, sin = x.transpose(1, 2), cos[:, :, None], sin[:, :, None]
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = (
        torch.addcmul(first * cos[..., :half], second, sin[..., :half], value=-1),
        torch.addcmul(second * cos[..., half:], first, sin[..., half:]),
    )
    return torch.cat(turned, -1).transpose(1, 2)
