"""Counts the bytes of the tensors that a computation allocates, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the storages that operations allocate inside this context; `live` and `peak` are in bytes.

    Storages that were there before count nothing. What one operation allocates for itself and frees again,
    inside a kernel, is not seen, nor are weights in oneDNN's own layout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}  # of living storages, by a number of each
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in _storages((args, kwargs))}  # fake tensors have no address
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in before:  # else a view of an input
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = self._known[storage] = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """List the storages of the tensors in nested values; weights in oneDNN's own layout have none."""
    for tensor in tree_leaves(tree):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            yield tensor.untyped_storage()
