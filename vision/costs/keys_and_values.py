"""Memory of keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mmrl.config.registry import cost
from mmrl.core.protocols import Engine


@cost
@contextmanager
def keys_and_values(engine: Engine) -> Iterator[Mapping[str, float]]:
    """Measure what caches of keys and values hold at their largest, in bytes, and add up over batches.

    Everything that a cache reaches counts, room to grow and what it notes of padding included; tensors that
    share memory count once.
    """
    spent: dict[str, float] = {}
    peaks: list[int] = []
    handle = register_module_forward_hook(_Watch(peaks), with_kwargs=True)
    try:
        yield spent
    finally:
        handle.remove()
    spent["bytes of keys and values"] = float(sum(peaks))


class _Watch:
    """Looks at the cache after every pass through a model, and keeps the largest size since prompts were
    read."""

    def __init__(self, peaks: list[int]) -> None:
        self.peaks = peaks
        self.cache: Any = lambda: None

    def __call__(self, module: nn.Module, args: Any, given: Mapping[str, Any], out: Any) -> None:
        cache, ids = given.get("past_key_values"), given.get("input_ids")
        if cache is None or ids is None:  # a part of a model
            return
        # A model and the model with its head call each other with one cache.
        if cache.get_seq_length() == ids.shape[1] and self.cache() is not cache:
            self.peaks.append(0)
            self.cache = weakref.ref(cache)
        if self.peaks:
            self.peaks[-1] = max(self.peaks[-1], held_bytes(cache))


def held_bytes(thing: Any) -> int:
    """Add up the storages of all tensors that a thing reaches, every storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        match one:
            case Tensor():
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            case Mapping():
                left += one.values()
            case list() | tuple() | set() | frozenset():
                left += one
            case type() | FunctionType() | MethodType() | nn.Module():
                pass  # how it works, not what it holds
            case _:
                left += getattr(one, "__dict__", {}).values()
    return sum(storages.values())
