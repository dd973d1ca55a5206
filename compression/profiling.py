"""Profiling of models: operations, bytes and seconds, each with its theoretical value."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.flops import Prefill
from mmrl.compression.fp32_linear import UpcastLinear
from mmrl.compression.pruning.spec import core_of, pruning_of, shape_of
from mmrl.core.flop_counter import CountOperations


@contextmanager
def _named(modules: Mapping[str, nn.Module], where: list[str]) -> Iterator[None]:
    """Append the name of the running module to `where` while it runs."""
    hooks = []
    for name, module in modules.items():
        hooks.append(module.register_forward_pre_hook(lambda module, args, name=name: where.append(name)))
        hooks.append(module.register_forward_hook(lambda module, args, out: where.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def count_operations(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Count the operations of one call: "language" model, its "head", and the "rest" (vision tower)."""
    where = ["rest"]
    named = {"language": core_of(model).get_decoder(), "head": model.get_output_embeddings()}
    with _named(named, where), CountOperations(where) as count:
        model(**inputs)
    return {name: count.total[name] for name in ("language", "head", "rest")}


def tensor_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of tensors, shared storages once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers of a model."""
    return tensor_bytes(t for group in (model.parameters(), model.buffers()) for t in group)


def layer_cast_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of a model of `layer_cast`: "stored", and "peak" with the largest weight cast to float32.

    The peak is 2 * linear + 4 * rest + 4 * largest bytes, against 4 * (linear + rest) in float32.
    """
    linear = [m.weight.numel() for m in model.modules() if type(m) is UpcastLinear]
    stored = weight_bytes(model)
    return {"stored": stored, "peak": stored + 4 * max(linear, default=0)}


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values in a cache of dense layers, and of a pruned model's record of columns."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


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
    for turn in range(repeats + 1):
        for name, call in calls.items():
            _wait()
            start, work = time.perf_counter(), time.thread_time()
            call()
            _wait()
            if turn:
                taken[name].append((time.perf_counter() - start, time.thread_time() - work))
    return {
        name: Seconds(statistics.median(wall), max(wall) - min(wall), statistics.median(thread))
        for name, (wall, thread) in ((name, zip(*times, strict=True)) for name, times in taken.items())
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decode_floor(model: nn.Module, cache: Any, bandwidth: float) -> float:
    """Lower bound of the seconds of a decoding step at `bandwidth` bytes per second.

    The weights of the language model and its head, and the cache, are read once; of the embedding only single
    rows are read, and the vision tower does not run.
    """
    text = core_of(model).get_decoder()
    embedding = {id(p) for p in text.get_input_embeddings().parameters()}
    read = [p for p in text.parameters() if id(p) not in embedding]
    read += list(model.get_output_embeddings().parameters())
    return (tensor_bytes(iter(read)) + cache_bytes(cache)) / bandwidth


@torch.no_grad()
def measure(
    models: Mapping[str, nn.Module], inputs: Mapping[str, Any], theory: Prefill, *, repeats: int = 5,
    steps: int = 8, bandwidth: float | None = None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Measure operations, bytes, and seconds of prefill and decoding of models on one call of one row.

    `theory` has the token counts of the call, for the theoretical values. Ratios are relative to the first
    model. `bandwidth` in bytes per second adds the lower bound of a decoding step.
    """
    keep = {**inputs, "use_cache": True}
    prefill = time_calls({n: lambda m=m: m(**keep) for n, m in models.items()}, repeats=repeats)
    results: dict[str, dict[str, float]] = {}
    for name, model in models.items():
        shape, pruning = shape_of(model), pruning_of(model)
        counted = count_operations(model, keep)
        cache = model(**keep).past_key_values
        results[name] = {
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
            **_decoding(model, cache, inputs, steps, bandwidth),
        }
    first = next(iter(results.values()))
    for row in results.values():
        row["speed"] = first["prefill_seconds"] / row["prefill_seconds"]
        row["speed_by_operations"] = first["operations"] / row["operations"]
    return results


def _decoding(
    model: nn.Module, cache: Any, inputs: Mapping[str, Any], steps: int, bandwidth: float | None
) -> dict[str, float]:
    token, mask, taken = inputs["input_ids"][:, -1:], torch.ones_like(inputs["input_ids"]), []
    floor = {} if bandwidth is None else {"decode_floor": decode_floor(model, cache, bandwidth)}
    for _ in range(steps):
        mask = torch.cat([mask, mask[:, :1]], 1)
        start = time.perf_counter()
        model(input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True)
        _wait()
        taken.append(time.perf_counter() - start)
    return {"decode_seconds": statistics.median(taken), **floor}


@torch.no_grad()
def divergence(model: nn.Module, rows: Mapping[str, Tensor], *, length: int = 32) -> dict[str, float]:
    """Compare greedy answers to rows in one batch and one by one (arXiv 2506.09501).

    Returns the "share" of answers that differ, the mean "first" token at which they do, and the mean
    "top1_gap" of the probability of the chosen token up to there. Every tensor of `rows` has a row for each
    prompt, without padding.
    """
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    together = model.generate(**rows, **options)
    batched = torch.stack(together.logits, 1).double().softmax(-1).max(-1)
    firsts, gaps = [], []
    for row in range(len(rows["input_ids"])):
        alone = model.generate(**{name: value[row : row + 1] for name, value in rows.items()}, **options)
        single = torch.stack(alone.logits, 1)[0].double().softmax(-1).max(-1)
        other = (single.indices != batched.indices[row]).nonzero()[:, 0]
        end = int(other[0]) if len(other) else length
        firsts += [end] if len(other) else []
        gaps += (single.values - batched.values[row])[: end + 1].abs().tolist()
    return {
        "share": len(firsts) / len(rows["input_ids"]),
        "first": statistics.mean(firsts) if firsts else float("nan"),
        "top1_gap": statistics.mean(gaps),
    }
