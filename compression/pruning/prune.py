"""Pruned views of a model: copies of its modules that share all weights but run another forward pass."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.families import adapter_of
from mmrl.compression.pruning.forward import forward_core, forward_text
from mmrl.compression.pruning.patch_grid import forward_features
from mmrl.compression.pruning.spec import PRUNING, TokenReduction, pruning_of, shape_of
from mmrl.runtime.modules import record_transform


def prune(
    model: nn.Module,
    name: str,
    options: Mapping[str, Any],
    *,
    reductions: Sequence[TokenReduction] = (),
    **changes: Any,
) -> nn.Module:
    """Return a view of a model with additional pruning; the view shares every weight with the model.

    `name` and `options` are recorded, so that the view can be saved and restored. `reductions` are added to
    the reductions of the model. `changes` are other fields of `PruningSpec`.
    """
    layers, before = shape_of(model).layers, pruning_of(model)
    for reduction in reductions:
        if not 0 <= reduction.layer <= layers:
            raise ValueError(
                f"tokens cannot leave in front of layer {reduction.layer} of a model with {layers} layers"
            )
    adapter_of(model.base_model)  # raises an error for families without an adapter
    view = record_transform(share_weights(model), model, name, options)
    core, text = view.base_model, view.base_model.get_decoder()
    # If reductions have the same layer, choose tokens first and remove all tokens last, so that both can run.
    order = lambda reduction: (reduction.layer, reduction.choose is None)
    reductions = tuple(sorted((*before.reductions, *reductions), key=order))
    vars(core)[PRUNING] = replace(before, reductions=reductions, **changes)
    # Instance attributes override the class methods. A `BoundFunction` is rebound in a deep copy of the view.
    core.forward = BoundFunction(forward_core, core)
    text.forward = BoundFunction(forward_text, text, core)
    for kind in ("image", "video"):
        getter = f"get_{kind}_features"
        if method := getattr(type(core), getter, None):
            # `generate` reads the method's arguments from its signature; a bound method has no `self` in it.
            bound = BoundFunction(forward_features, core, kind, method)
            bound.__signature__ = inspect.signature(partial(method, core))
            setattr(core, getter, bound)
    return view


def share_weights(module: nn.Module, swap: Mapping[int, nn.Module] | None = None) -> nn.Module:
    """Copy a tree of modules without copying tensors; `swap` maps the `id` of modules to replacements.

    Adapters that are added to the copy do not appear in the original, and vice versa.
    """
    copies = dict(swap or {})

    def copied(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        view = copies[id(module)] = copy.copy(module)
        state = vars(view)
        # Copy the dictionaries of parameters, buffers and hooks: new hooks must not affect the original.
        tables = [name for name in state if name[0] == "_" and type(state[name]) in (dict, OrderedDict, set)]
        state |= {name: copy.copy(state[name]) for name in tables}
        for name, child in view._modules.items():
            view._modules[name] = None if child is None else copied(child)
        for name in [name for name in state if type(state[name]) is BoundFunction]:
            state[name] = state[name].onto(copies)
        return view

    return copied(module)


class BoundFunction:
    """A partial function kept by a module; a copy of the module binds it to copies of its module arguments.

    Works for `copy.deepcopy` and for `share_weights`.
    """

    def __init__(self, function: Callable, *first: Any) -> None:
        self.function, self.first = function, first

    def __call__(self, *rest: Any, **named: Any) -> Any:
        return self.function(*self.first, *rest, **named)

    def onto(self, copies: Mapping[int, nn.Module]) -> BoundFunction:
        """Return the function bound to copies of its modules; `copies` maps a module's `id` to its copy."""
        moved = copy.copy(self)
        moved.first = tuple(copies.get(id(arg), arg) for arg in self.first)
        return moved
