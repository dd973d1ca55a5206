"""Make a pruned view of a model: the same weights, with less visual computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.lookup import decoder_of
from mmrl.compression.pruning.forward import run_core, run_features, run_text
from mmrl.compression.pruning.spec import PRUNING, core_of, pruning_of
from mmrl.compression.pruning.weight_views import Bound, note, share


def prune(model: nn.Module, name: str, options: Mapping[str, Any], **changes: Any) -> nn.Module:
    """Make a view of a model that leaves out more: it shares every weight with the model.

    `name` and `options` are noted, so that the view can be saved and made again; `changes` are fields of
    `Pruning`.
    """
    model_core = core_of(model)
    decoder_of(model_core)
    view = note(share(model), model, name, options)
    core = core_of(view)
    vars(core)[PRUNING] = replace(pruning_of(model), **changes)
    # Instance attributes, found before the methods of the class; they follow a deep copy of the view.
    core.forward = Bound(run_core, core)
    for kind in ("image", "video"):
        name = f"get_{kind}_features"
        if name in dir(type(core)):
            setattr(core, name, Bound(run_features, core, kind, like=getattr(model_core, name)))
    text = core.get_decoder()
    text.forward = Bound(run_text, text, core)
    return view
