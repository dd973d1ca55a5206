"""Counter for the bytes of the tensors that a computation allocates, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Context manager that counts bytes of new tensor storages: `live` (current) and `peak` (maximum).

    Not counted: storages from before, temporary memory in kernels, and weights in oneDNN's layout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in _storages((args, kwargs))}  # fake tensors have no `data_ptr`
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata in before or storage in self._counted:  # the storage existed before
                continue
            self._counted.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors in nested values; skip weights in oneDNN's layout (no storage)."""
    for tensor in tree_leaves(tree):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            yield tensor.untyped_storage()
