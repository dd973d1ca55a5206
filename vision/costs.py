"""Cost metric: memory of the KV cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
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
    """Measure the peak size of the KV cache in bytes inside the context, summed over batches.

    All tensors of a cache count, including preallocated slots and padding masks. Shared storage counts once.
    """
    spent: dict[str, float] = {}
    peaks: list[int] = []  # largest size of each cache so far, in bytes
    latest: Callable[[], Any] = lambda: None  # weak reference to the latest cache

    def record(module: nn.Module, args: Any, options: Mapping[str, Any], output: Any) -> None:
        nonlocal latest
        cache, ids = options.get("past_key_values"), options.get("input_ids")
        if cache is None or ids is None:  # not the forward pass of a whole model
            return
        # Count a cache once: the hook runs twice, for the model with its head and for the model inside it.
        if cache.get_seq_length() == ids.shape[1] and latest() is not cache:
            peaks.append(0)
            latest = weakref.ref(cache)
        if peaks:
            peaks[-1] = max(peaks[-1], held_bytes(cache))

    handle = register_module_forward_hook(record, with_kwargs=True)
    try:
        yield spent
    finally:
        handle.remove()
    spent["bytes of keys and values"] = float(sum(peaks))


def held_bytes(thing: Any) -> int:
    """Return the bytes of all tensors that an object references, also indirectly; count a storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case Tensor():
                # Views share the storage of their base, whose address is the key.
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            case Mapping():
                left += value.values()
            case list() | tuple() | set() | frozenset():
                left += value
            case type() | FunctionType() | MethodType() | nn.Module():
                pass  # code and weights are not part of a cache
            case object(__dict__=attributes):
                left += attributes.values()
    return sum(storages.values())
