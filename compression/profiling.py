"""Profiling of models: operations, bytes and seconds; `flops` has their theoretical values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmrl.core.flop_counter import CountOperations


@torch.no_grad()
def count_operations(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Count the operations of one call: "language" model, its "head", and the "rest" (vision tower)."""
    parts = {"language": model.base_model.get_decoder(), "head": model.get_output_embeddings()}
    where, hooks = ["rest"], []  # the counter books operations on the last name, that of the running part
    for name, part in parts.items():
        hooks.append(part.register_forward_pre_hook(lambda module, args, name=name: where.append(name)))
        hooks.append(part.register_forward_hook(lambda module, args, out: where.pop() and None))
    try:
        with CountOperations(where) as count:
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: count.total[name] for name in ("language", "head", "rest")}


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values in a cache of dense layers, and of a pruned model's record of columns."""
    tensors = (x for layer in cache.layers for x in (layer.keys, layer.values))
    return sum(x.nbytes for x in tensors if x is not None)  # None in layers that nothing was written to


@dataclass(frozen=True)
class Seconds:
    """Median and spread (maximum minus minimum) of repeated calls, and the median of thread CPU time.

    With one thread on a shared machine, thread time is what the call costs.
    """

    median: float
    spread: float
    thread: float


def time_calls(calls: Mapping[str, Callable[[], Any]], *, repeats: int = 5) -> dict[str, Seconds]:
    """Time calls in turns, so that a machine that slows down slows all of them; the first turn is dropped."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None  # kernels run asynchronously
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            wait()
            start, work = time.perf_counter(), time.thread_time()
            call()
            wait()
            taken[name].append((time.perf_counter() - start, time.thread_time() - work))
    seconds = {}
    for name, times in taken.items():
        wall, thread = zip(*times[1:], strict=True)  # the first turn fills caches and allocators
        seconds[name] = Seconds(statistics.median(wall), max(wall) - min(wall), statistics.median(thread))
    return seconds
