"""Profiling of models: operations, bytes and seconds, each with its theoretical value."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.flops import Prefill
from mmrl.compression.pruning.spec import pruning_of, shape_of
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


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, shared storages once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers of a model."""
    return tensor_bytes([*model.parameters(), *model.buffers()])


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values in a cache of dense layers, and of a pruned model's record of columns."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(t.nbytes for t in tensors if t is not None)


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
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            _wait()
            start, work = time.perf_counter(), time.thread_time()
            call()
            _wait()
            taken[name].append((time.perf_counter() - start, time.thread_time() - work))
    seconds = {}
    for name, times in taken.items():
        wall, thread = zip(*times[1:], strict=True)
        seconds[name] = Seconds(statistics.median(wall), max(wall) - min(wall), statistics.median(thread))
    return seconds


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def measure(
    models: Mapping[str, nn.Module], inputs: Mapping[str, Any], theory: Prefill, *, repeats: int = 5,
    steps: int = 8, bandwidth: float | None = None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Measure operations, bytes, and seconds of prefill and decoding of models on one call of one row.

    `theory` has the token counts of the call, for the theoretical values. Ratios are relative to the first
    model. `bandwidth` in bytes per second adds `decode_floor`, the seconds in which a decoding step can read
    the weights of the language model and its head, and the cache, once.
    """
    keep = {**inputs, "use_cache": True}
    prefill = time_calls({n: lambda m=m: m(**keep) for n, m in models.items()}, repeats=repeats)
    results: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        shape, pruning = shape_of(model), pruning_of(model)
        counted, cache = count_operations(model, keep), model(**keep).past_key_values
        results[name] = row = {
            "prefill_seconds": prefill[name].median,
            "prefill_spread": prefill[name].spread,
            "prefill_thread_seconds": prefill[name].thread,
            "operations": counted["language"],
            "operations_formula": theory.operations(shape, pruning),
            "operations_of_visual_tokens": theory.visual_operations(shape, pruning),
            "head_operations": counted["head"],
            "tower_operations": counted["rest"],
            "weight_bytes": weight_bytes(model),
            "cache_bytes": cache_bytes(cache),
            "cache_bytes_formula": theory.cache_bytes(shape, pruning, cache.layers[0].keys.element_size()),
        }
        if bandwidth is not None:
            text = model.base_model.get_decoder()
            # Of the embedding only single rows are read, and the vision tower does not run.
            unread = {id(p) for p in text.get_input_embeddings().parameters()}
            read = [p for p in text.parameters() if id(p) not in unread]
            read += model.get_output_embeddings().parameters()
            row["decode_floor"] = (tensor_bytes(read) + cache_bytes(cache)) / bandwidth
        row["decode_seconds"] = _decode_seconds(model, cache, inputs["input_ids"], steps)
    first = next(iter(results.values()))
    for row in results.values():
        row["speed"] = first["prefill_seconds"] / row["prefill_seconds"]
        row["speed_by_operations"] = first["operations"] / row["operations"]
    return results


def _decode_seconds(model: nn.Module, cache: Any, ids: Tensor, steps: int) -> float:
    """Median seconds of decoding steps after the prompt `ids` (1, S), whose cache grows with each."""
    mask, taken = torch.ones_like(ids), []
    for _ in range(steps):
        mask = torch.cat([mask, mask[:, :1]], 1)
        start = time.perf_counter()
        model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True)
        _wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
