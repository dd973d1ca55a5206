"""Views: models that share their weights with another one but compute differently, and what was done to
them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

RECORD = "mmrl_transforms"
STORED = (
    "structured_pruning",
)  # transforms whose result an ordinary folder holds, which are not applied again on loading


def share(module: nn.Module, swap: Mapping[int, nn.Module] | None = None) -> nn.Module:
    """Copy a tree of modules, but not their tensors; modules whose `id` is in `swap` are replaced by what
    stands there.

    Adapters that are put on the copy do not appear in the original, and the other way round.
    """
    return _share(module, dict(swap or {}))


def _share(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    twin = copy.copy(module)
    known[id(module)] = twin
    state = vars(twin)
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        state[name] = copy.copy(state[name])
    # `copy.copy` carries hooks over by reference; a hook on the copy must not run in the original.
    for name in [name for name in state if name.endswith(("_hooks", "_hooks_with_kwargs"))]:
        state[name] = copy.copy(state[name])
    children = vars(module)["_modules"]
    state["_modules"] = {
        name: child if child is None else _share(child, known) for name, child in children.items()
    }
    for name in [name for name in state if type(state[name]) is Bound]:
        state[name] = state[name].onto(known)
    return twin


class Bound:
    """A function with its first arguments, which follows the module that holds it when that is copied,
    by `copy.deepcopy` or by `share`."""

    def __init__(self, function: Callable, *first: Any, like: Callable | None = None) -> None:
        self.function, self.first = function, first
        if like is not None:  # `generate` reads what a method takes off its signature
            self.__signature__ = inspect.signature(like)

    def __call__(self, *rest: Any, **named: Any) -> Any:
        return self.function(*self.first, *rest, **named)

    def onto(self, known: Mapping[int, nn.Module]) -> Bound:
        """Bind the function to what stands for its modules in a copy, by `id`."""
        moved = copy.copy(self)
        moved.first = tuple(known.get(id(one), one) for one in self.first)
        return moved


def applied(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """List what was done to a model: `{"name": ..., option: ...}` of every transform, in order."""
    return vars(model).get(RECORD, ())


def note(model: nn.Module, before: nn.Module, name: str, options: Mapping[str, Any]) -> nn.Module:
    """Note on a model that a transform was applied to the model `before`; twice the same is an error."""
    done = applied(before)
    if name in [one["name"] for one in done]:
        raise ValueError(
            f"the transform '{name}' was applied to this model already, with "
            f"{done_options(done, name)}; apply it once, with the options you want"
        )
    vars(model)[RECORD] = (*done, {"name": name, **options})
    return model


def done_options(done: tuple[dict[str, Any], ...], name: str) -> dict[str, Any]:
    """Find the options that a transform was applied with."""
    return next({k: v for k, v in one.items() if k != "name"} for one in done if one["name"] == name)
