"""LayerCast: weights stored in 16 bits, computation in float32."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from mmrl.compression.fp32_linear import UpcastLinear
from mmrl.compression.pruning.prune import share_weights
from mmrl.config.registry import transform
from mmrl.runtime.modules import DTYPES, LOW, record_transform


@transform
def layer_cast(
    model: nn.Module,
    *,
    storage: Literal["bfloat16", "float16"] = "bfloat16",
    compute: Literal["float32", "float64"] = "float32",
) -> nn.Module:
    """Store linear layers in 16 bits and cast each to float32 just before its computation (LayerCast).

    Everything else, including the cache, is in float32, so that greedy answers hardly depend on the batch
    size. The policy must have `dtype: float32`. Linear layers take half of the memory of float32 layers,
    because at most one of them is in float32 at a time. arXiv 2506.09501.
    """
    if torch.backends.cuda.matmul.allow_tf32:
        raise ValueError(
            "`layer_cast` needs exact float32 products; set torch.backends.cuda.matmul.allow_tf32 = False"
        )
    low, wide = DTYPES[storage], DTYPES[compute]
    layers = model.base_model.get_decoder().layers
    swap = {id(m): UpcastLinear(m, low, wide) for m in layers.modules() if isinstance(m, nn.Linear)}
    view = share_weights(model, swap)
    cast: dict[int, nn.Parameter] = {}  # keyed by the id of the original, so that tied parameters stay tied
    for module in view.modules():
        if type(module) is UpcastLinear:  # such a layer keeps its 16-bit weights
            continue
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.dtype in LOW:
                copied = nn.Parameter(parameter.detach().to(wide), requires_grad=parameter.requires_grad)
                setattr(module, name, cast.setdefault(id(parameter), copied))
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.dtype in LOW:
                module._buffers[name] = buffer.to(wide)
    return record_transform(view, model, "layer_cast", {"storage": storage, "compute": compute})
