"""Views of a model with shared weights but other computation, and the record of applied transforms."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

RECORD = "mmrl_transforms"
# Transforms whose result is in the saved checkpoint itself, so that loading does not apply them again.
STORED = ("structured_pruning",)


def share_weights(module: nn.Module, swap: Mapping[int, nn.Module] | None = None) -> nn.Module:
    """Copy a tree of modules without copying tensors; `swap` maps the `id` of modules to replacements.

    Adapters that are added to the copy do not appear in the original, nor the other way round.
    """
    return _copy_tree(module, dict(swap or {}))


def _copy_tree(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    copied = copy.copy(module)
    known[id(module)] = copied
    state = vars(copied)
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        state[name] = copy.copy(state[name])
    # `copy.copy` carries hooks over by reference; a hook on the copy must not run in the original.
    for name in [name for name in state if name.endswith(("_hooks", "_hooks_with_kwargs"))]:
        state[name] = copy.copy(state[name])
    children = vars(module)["_modules"]
    state["_modules"] = {
        name: child if child is None else _copy_tree(child, known) for name, child in children.items()
    }
    for name in [name for name in state if type(state[name]) is BoundFunction]:
        state[name] = state[name].onto(known)
    return copied


class BoundFunction:
    """A partial function whose module arguments are replaced when its owner is copied.

    Works for `copy.deepcopy` and for `share_weights`.
    """

    def __init__(self, function: Callable, *first: Any, like: Callable | None = None) -> None:
        self.function, self.first = function, first
        if like is not None:  # `generate` reads the arguments of a method from its signature
            self.__signature__ = inspect.signature(like)

    def __call__(self, *rest: Any, **named: Any) -> Any:
        return self.function(*self.first, *rest, **named)

    def onto(self, known: Mapping[int, nn.Module]) -> BoundFunction:
        """Rebind the function to the copies of its modules, looked up by `id`."""
        moved = copy.copy(self)
        moved.first = tuple(known.get(id(arg), arg) for arg in self.first)
        return moved


def applied_transforms(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """List the transforms of a model as `{"name": ..., option: ...}`, in order of application."""
    return vars(model).get(RECORD, ())


def record_transform(model: nn.Module, before: nn.Module, name: str, options: Mapping[str, Any]) -> nn.Module:
    """Record on a view that a transform was applied to the model `before`; twice raises ValueError."""
    done = applied_transforms(before)
    if name in [entry["name"] for entry in done]:
        raise ValueError(
            f"the transform '{name}' was applied to this model already, with "
            f"{done_options(done, name)}; apply it once, with the options you want"
        )
    vars(model)[RECORD] = (*done, {"name": name, **options})
    return model


def done_options(done: tuple[dict[str, Any], ...], name: str) -> dict[str, Any]:
    """Return the options that a transform was applied with."""
    return next({k: v for k, v in entry.items() if k != "name"} for entry in done if entry["name"] == name)
