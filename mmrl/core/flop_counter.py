"""Counter of the floating-point operations of matrix products, convolutions and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.core.onednn import BUILT

aten = torch.ops.aten


# The left matrix is args[-2], both in mm(a, b) and in addmm(bias, a, b).
def _product(args: Sequence[Any], out: Any, left: int = -2) -> int:
    return 2 * args[left].shape[-1] * out.numel()  # (m, k) @ (k, n): k products and sums per output


def _convolution(args: Sequence[Any], out: Any) -> int:
    # Each output element (of a transposed convolution: each input element) uses one channel's weights once.
    return 2 * args[1][0].numel() * (args[0] if args[6] else out).numel()


def _attention(args: Sequence[Any], out: Any, causal: int = 4) -> int:
    """Count the operations of attention for q (batch, heads, queries, d); `args[causal]` is `is_causal`."""
    q, k, v = args[:3]
    pairs = q.shape[-2] * k.shape[-2]
    if len(args) > causal and args[causal]:  # query i attends to min(i + 1, keys) keys
        pairs = sum(min(i + 1, k.shape[-2]) for i in range(q.shape[-2]))
    return 2 * q.shape[0] * q.shape[1] * pairs * (q.shape[-1] + v.shape[-1])  # q k^T, and weights times v


# A multiplication with an addition counts as 2 operations; elementwise operations and look-ups count 0.
COUNTED: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _product,
    aten.baddbmm.default: _product,
    aten.baddbmm_.default: _product,
    aten.convolution.default: _convolution,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention.default: _attention,
    # The operators below take (q, k, v, bias, compute_log_sumexp, dropout, causal); those above, no bias.
    aten._scaled_dot_product_cudnn_attention.default: partial(_attention, causal=6),
    aten._scaled_dot_product_efficient_attention.default: partial(_attention, causal=6),
}
if BUILT:
    pointwise = torch.ops.mkldnn._linear_pointwise
    COUNTED |= dict.fromkeys((pointwise.default, pointwise.binary), partial(_product, left=0))


class CountOperations(TorchDispatchMode):
    """Counts floating-point operations in `total`, by label: the caller pushes and pops labels in `where`."""

    def __init__(self, where: list[str] | None = None) -> None:
        super().__init__()
        self.where, self.total = where or ["all"], Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COUNTED:
            first = out if torch.is_tensor(out) else out[0]  # attention also returns its log-sum-exp
            self.total[self.where[-1]] += COUNTED[func](args, first)
        return out
