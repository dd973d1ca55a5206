"""Nested states as JSON and a flat list of named tensors, for safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flatten(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Convert a nested state to JSON; its tensors go into `tensors`, by their path in the state."""
    match value:
        case Tensor():
            tensors[path] = value.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
            return {"tensor": path}
        case Mapping():
            # A list of pairs, because JSON would turn the whole-number keys of optimizers into strings.
            return {"map": [(key, flatten(inner, tensors, f"{path}/{key}")) for key, inner in value.items()]}
        case list() | tuple():
            return {"list": [flatten(inner, tensors, f"{path}/{i}") for i, inner in enumerate(value)]}
        case None | bool() | int() | float() | str():
            return {"plain": value}
    raise TypeError(
        f"cannot save '{path}': a state holds tensors, numbers and strings, not {type(value).__name__}"
    )


def unflatten(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Make the state that `flatten` took apart; tuples have become lists."""
    match tree:
        case {"tensor": name}:
            return tensors[name]
        case {"map": pairs}:
            return {key: unflatten(inner, tensors) for key, inner in pairs}
        case {"list": items}:
            return [unflatten(inner, tensors) for inner in items]
    return tree["plain"]
