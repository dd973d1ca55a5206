"""YOPO presets: window, layers, heads and feed-forward units pruned together for visual tokens."""

from __future__ import annotations

from torch import nn

from mmrl.compression.pruning.spec import shape_of
from mmrl.compression.transforms.drop_visual_heads import drop_visual_heads
from mmrl.compression.transforms.drop_visual_layers import drop_visual_layers
from mmrl.compression.transforms.local_visual_attention import local_visual_attention
from mmrl.compression.transforms.sparse_visual_ffn import sparse_visual_ffn
from mmrl.config.registry import transform


@transform
def yopo25(model: nn.Module, *, plan: str = "", causal: bool = True) -> nn.Module:
    """Prune visual computation to about a quarter: half of the layers, heads and feed-forward units.

    Visual attention has a window of 5 by 5 patches; a `plan` (path) chooses the heads; `causal` as in
    `local_visual_attention`. arXiv 2410.06169; the paper does not publish how budgets map to settings: this
    mapping is our reading and leaves 24.5 % of LLaVA-1.5-7B by the paper's formula.
    """
    return _yopo(model, 0.5, 0.5, plan, causal)


@transform
def yopo12(model: nn.Module, *, plan: str = "", causal: bool = True) -> nn.Module:
    """Prune visual computation to about an eighth: half of the layers, a quarter of heads and units.

    Window, `plan` and `causal` as in `yopo25`. arXiv 2410.06169; our reading as in `yopo25`, which leaves
    12.2 % by the paper's formula.
    """
    return _yopo(model, 0.25, 0.25, plan, causal)


def _yopo(model: nn.Module, heads: float, ffn_units: float, plan: str, causal: bool) -> nn.Module:
    model = local_visual_attention(model, radius=2, causal=causal)
    model = drop_visual_heads(model, keep=heads, plan=plan)
    model = sparse_visual_ffn(model, keep=ffn_units)
    return drop_visual_layers(model, after=max(1, shape_of(model).layers // 2))
