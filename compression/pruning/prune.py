"""Pruned views of a model: the same weights with less visual computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.lookup import adapter_of
from mmrl.compression.pruning.forward import forward_core, forward_features, forward_text
from mmrl.compression.pruning.sliced_linear import BoundFunction, record_transform, share_weights
from mmrl.compression.pruning.spec import PRUNING, core_of, pruning_of


def prune(model: nn.Module, name: str, options: Mapping[str, Any], **changes: Any) -> nn.Module:
    """Return a view of a model with more pruning; the view shares every weight with the model.

    `name` and `options` are recorded, so that the view can be saved and restored; `changes` are fields of
    `PruningSpec`.
    """
    model_core = core_of(model)
    adapter_of(model_core)
    view = record_transform(share_weights(model), model, name, options)
    core = core_of(view)
    vars(core)[PRUNING] = replace(pruning_of(model), **changes)
    # Instance attributes override the methods of the class, and are rebound in a deep copy of the view.
    core.forward = BoundFunction(forward_core, core)
    for kind in ("image", "video"):
        name = f"get_{kind}_features"
        if name in dir(type(core)):
            setattr(core, name, BoundFunction(forward_features, core, kind, like=getattr(model_core, name)))
    text = core.get_decoder()
    text.forward = BoundFunction(forward_text, text, core)
    return view
