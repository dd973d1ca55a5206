"""A linear layer that stores 16-bit weights and computes in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Upcast(torch.autograd.Function):
    """Linear function that casts the weight in forward and in backward, so that no float32 copy is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # save the 16-bit weight, which is in memory anyway
        ctx.with_bias = bias is not None
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat = grad.flatten(0, -2)  # (tokens, out_features)
        return (
            grad @ weight.to(grad.dtype) if needs_x else None,
            (flat.T @ x.flatten(0, -2)).to(weight.dtype) if needs_weight else None,
            flat.sum(0).to(weight.dtype) if needs_bias and ctx.with_bias else None,
        )


class UpcastLinear(nn.Linear):
    """A linear layer that stores its weight in `storage` and casts it to `compute` for every product."""

    def __init__(self, linear: nn.Linear, storage: torch.dtype, compute: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.compute = compute
        self.train(linear.training)
        for name, parameter in linear.named_parameters(recurse=False):
            stored = nn.Parameter(parameter.detach().to(storage), requires_grad=parameter.requires_grad)
            self.register_parameter(name, stored)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer in the dtype `compute`, regardless of the dtype of the input."""
        return _Upcast.apply(x.to(self.compute), self.weight, self.bias)
