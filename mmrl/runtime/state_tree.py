"""Conversion of nested states to JSON and a flat mapping of named tensors, for safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flatten(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Convert a nested state to JSON; add its tensors to `tensors` by path, without copying on the CPU."""
    match value:
        case Tensor():
            tensors[path] = value.detach().cpu().contiguous()
            return {"tensor": path}
        case Mapping():
            # Store mappings as pairs, because JSON would turn an optimizer's integer keys into strings.
            return {"map": [(key, flatten(inner, tensors, f"{path}/{key}")) for key, inner in value.items()]}
        case list() | tuple():
            return {"list": [flatten(inner, tensors, f"{path}/{i}") for i, inner in enumerate(value)]}
        case None | bool() | int() | float() | str():
            return {"plain": value}
    raise TypeError(
        f"cannot save '{path}': a state holds tensors, numbers and strings, not {type(value).__name__}"
    )


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory or are views of larger ones, which safetensors refuses."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shares = storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        seen.add(storage.data_ptr())
        own[name] = tensor.clone() if shares else tensor
    return own


def unflatten(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state that `flatten` converted; tuples become lists."""
    match tree:
        case {"tensor": name}:
            return tensors[name]
        case {"map": pairs}:
            return {key: unflatten(inner, tensors) for key, inner in pairs}
        case {"list": items}:
            return [unflatten(inner, tensors) for inner in items]
    return tree["plain"]
