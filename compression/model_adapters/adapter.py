"""What a family of models must tell, so that its visual computation can be pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.pruning.sliced_linear import Features, narrow

Rasters = list[tuple[int, int]]  # (rows, columns) of every picture or frame, in the order of their tokens


@dataclass(frozen=True)
class Decoder:
    """How a family lays out pictures, and how a layer of its language model makes queries, keys and values.

    `rasters(core, inputs)` gives, by the id of a placeholder token, the rasters of the media in the batch;
    empty where they are not known. `project(attn, x, queries, keys)` gives queries, keys and values of (B, n,
    width) states, each (B, heads, n, D), before rotation, of the named heads only. `positions(ids, batch)`
    brings `position_ids` into the form that the model's `rotary_emb` takes. `ranker(core)` is the attention
    of the vision tower whose class token ranks patches (VisionZip), where there is one. `noted`: rasters are
    known only where media are encoded, so their features carry them along.
    """

    rasters: Callable[[nn.Module, Mapping[str, Any]], dict[int, Rasters]]
    project: Callable[[nn.Module, Tensor, Features, Features], tuple[Tensor, Tensor, Tensor]]
    positions: Callable[[Tensor, int], Tensor]
    ranker: Callable[[nn.Module], nn.Module] | None = None
    noted: bool = False


def placeholders(config: Any) -> tuple[int, ...]:
    """List the tokens that stand for pictures and clips."""
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")]
    return tuple(token for token in named if token is not None)


def heads(x: Tensor, size: int) -> Tensor:
    """Split the last axis into heads: (B, n, H * D) to (B, H, n, D)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def project(attn: nn.Module, x: Tensor, queries: Features, keys: Features) -> tuple[Tensor, Tensor, Tensor]:
    """Project as Llama and its descendants do."""
    size = attn.head_dim
    return (
        heads(narrow(attn.q_proj, x, rows=queries), size),
        heads(narrow(attn.k_proj, x, rows=keys), size),
        heads(narrow(attn.v_proj, x, rows=keys), size),
    )


def project_normed(
    attn: nn.Module, x: Tensor, queries: Features, keys: Features
) -> tuple[Tensor, Tensor, Tensor]:
    """Project as Qwen3 does, which normalises every head."""
    q, k, v = project(attn, x, queries, keys)
    return attn.q_norm(q), attn.k_norm(k), v


def in_line(ids: Tensor, batch: int) -> Tensor:
    """Give every row its positions: (B, n)."""
    return ids.expand(batch, -1)


def on_axes(ids: Tensor, batch: int) -> Tensor:
    """Give three axes of positions: (3, B, n). A fourth one in front is of use to packing only."""
    ids = ids if ids.dim() == 3 else ids[None]
    return ids[-3:].expand(3, batch, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (B, H, n, D) queries or keys by their positions; `cos` and `sin` are (B, n, D)."""
    # In the layout that the projection left, so that nothing is rearranged.
    x, cos, sin = x.transpose(1, 2), cos[:, :, None], sin[:, :, None]
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = (
        torch.addcmul(first * cos[..., :half], second, sin[..., :half], value=-1),
        torch.addcmul(second * cos[..., half:], first, sin[..., half:]),
    )
    return torch.cat(turned, -1).transpose(1, 2)
