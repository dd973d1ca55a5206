"""LayerCast: weights in 16 bits, computation in 32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from mmrl.compression.fp32_linear import UpcastLinear
from mmrl.compression.pruning.spec import core_of
from mmrl.compression.pruning.weight_views import note, share
from mmrl.config.registry import transform
from mmrl.runtime.modules import DTYPES, LOW


@transform
def layer_cast(
    model: nn.Module,
    *,
    storage: Literal["bfloat16", "float16"] = "bfloat16",
    compute: Literal["float32", "float64"] = "float32",
) -> nn.Module:
    """Store the linear layers of the language model in 16 bits and compute in float32, each cast just in
    time.

    Everything else, the cache too, is float32. Greedy answers then hardly depend on the batch they were made
    in. Give the policy `dtype: float32`; with 16 bits it would compute in those. Half of the bytes of linear
    layers are saved, and at most one of them is held wide at a time. arXiv 2506.09501.
    """
    if torch.backends.cuda.matmul.allow_tf32:
        raise ValueError(
            "`layer_cast` needs exact float32 products; set torch.backends.cuda.matmul.allow_tf32 = False"
        )
    low, wide = DTYPES[storage], DTYPES[compute]
    layers = core_of(model).get_decoder().layers
    swap = {id(m): UpcastLinear(m, low, wide) for m in layers.modules() if isinstance(m, nn.Linear)}
    view = share(model, swap)
    known: dict[int, nn.Parameter] = {}
    for module in view.modules():
        if type(module) is not UpcastLinear:
            _widen(module, wide, known)
    return note(view, model, "layer_cast", {"storage": storage, "compute": compute})


def _widen(module: nn.Module, wide: torch.dtype, known: dict[int, nn.Parameter]) -> None:
    """Hold the tensors of a module itself in the wide type; tied ones stay tied."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if parameter.dtype in LOW:
            twin = nn.Parameter(parameter.detach().to(wide), requires_grad=parameter.requires_grad)
            setattr(module, name, known.setdefault(id(parameter), twin))
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if buffer.dtype in LOW:
            module._buffers[name] = buffer.to(wide)
