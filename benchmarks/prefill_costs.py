"""Operations, cache bytes and seconds of a prefill: by formula, and measured. A multiply-add counts as 2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmrl.compression.pruning.attention import split_heads
from mmrl.compression.pruning.local_attention import block_keys
from mmrl.compression.pruning.spec import ModelShape, PruningSpec
from mmrl.core.flop_counter import CountOperations


@dataclass(frozen=True)
class Prefill:
    """Token counts of one row of a call.

    Args:
        text: Text tokens.
        before: Text tokens before the last visual one.
        rasters: Grids (h, w) of visual tokens.
        kept: Visual tokens left by each token pruner, in order.
    """

    text: int
    before: int
    rasters: tuple[tuple[int, int], ...]
    kept: tuple[int, ...] = ()

    @property
    def visual(self) -> int:
        """Number of visual tokens."""
        return sum(h * w for h, w in self.rasters)

    def visual_by_layer(self, layers: int, pruning: PruningSpec) -> list[int]:
        """Count the visual tokens of every layer."""
        kept, num, counts = list(self.kept), self.visual, []
        reductions = list(pruning.reductions)
        for layer in range(layers):
            while reductions and reductions[0].layer == layer:
                num = 0 if reductions.pop(0).choose is None else kept.pop(0)
            counts.append(num)
        return counts

    def operations(self, shape: ModelShape, pruning: PruningSpec) -> int:
        """Count the operations of the language model without its head, text included.

        Window attention counts whole blocks, as they are computed, and causal attention half. Choosing and
        merging tokens is not counted.
        """
        total, s = 0, shape
        for i, n in enumerate(self.visual_by_layer(s.layers, pruning)):
            split, units = split_heads(pruning.heads_of(i), s.heads, s.kv_heads), pruning.ffn_units_of(i)
            kept = s.heads if split.kept is None else len(split.kept)
            needed = s.kv_heads if split.needed is None else len(split.needed)
            inner = s.inner if units is None else len(units)
            frozen = i in pruning.frozen
            # q and o have s.heads heads, k and v s.kv_heads; the gated MLP has three matrices.
            total += 2 * self.text * s.width * (s.head_dim * 2 * (s.heads + s.kv_heads) + 3 * s.inner)
            # A frozen layer computes only keys and values of visual tokens.
            total += 2 * n * s.width * s.head_dim * 2 * (needed + (0 if frozen else kept))
            total += 0 if frozen else 6 * n * s.width * inner
            # Two products of head_dim multiply-adds for each pair of query and key.
            total += 4 * s.head_dim * self.count_pairs(s, pruning, n, kept, frozen)
        return total

    def count_pairs(self, shape: ModelShape, pruning: PruningSpec, n: int, kept: int, frozen: bool) -> int:
        """Count pairs of query and key of a layer with `n` visual tokens, summed over heads.

        Visual tokens attend in `kept` heads; in a `frozen` layer only text attends.
        """
        text, columns = self.text, self.text + n
        if not n:
            return shape.heads * text * (text + 1) // 2  # causal: row i of text sees i columns
        lost = (shape.heads - kept) * text * columns  # in dropped heads only text attends
        if frozen or not kept:
            return lost + kept * text * columns
        if pruning.radius is None:
            return lost + kept * columns * (columns + 1) // 2  # causal over text and visual columns
        if n < self.visual:  # grids lost tokens: a mask over all pairs, none of them skipped
            return lost + kept * columns * columns
        near = 0
        for raster in self.rasters:
            blocks, queries, keys = block_keys(*raster, pruning.radius, pruning.causal)
            near += blocks * queries * (keys + self.before)
        return lost + kept * (text * columns + near)

    def visual_operations(self, shape: ModelShape, pruning: PruningSpec) -> float:
        """Count the operations of visual tokens as arXiv 2410.06169 does.

        Text is not counted, causal attention is not halved, and windows count their keys only, not blocks.
        """
        total = 0.0
        for i, n in enumerate(self.visual_by_layer(shape.layers, pruning)):
            if i in pruning.frozen:
                continue
            heads, units = pruning.heads_of(i), pruning.ffn_units_of(i)
            kept = shape.heads if heads is None else len(heads)
            inner = shape.inner if units is None else len(units)
            groups = shape.kv_heads * kept / shape.heads  # of keys and values, in proportion
            # q and o of `kept` heads and k and v of `groups`; scores and sums of values; the gated MLP
            total += 4 * n * shape.width * shape.head_dim * (kept + groups)
            total += 4 * n * self.mean_keys(pruning, n) * shape.head_dim * kept + 6 * n * shape.width * inner
        return total

    def mean_keys(self, pruning: PruningSpec, n: int) -> float:
        """Mean number of visual keys per visual query; windows include later neighbours."""
        if pruning.radius is None or n < self.visual or not n:
            return float(n)
        r = pruning.radius
        # Patches in reach of patch i of a side, summed over i; windows are cut off at the edges.
        along = lambda size: sum(min(size, i + r + 1) - max(0, i - r) for i in range(size))
        return sum(along(h) * along(w) for h, w in self.rasters) / n

    def cache_bytes(self, shape: ModelShape, pruning: PruningSpec, size: int) -> int:
        """Bytes of keys and values at `size` bytes per number, without the cache's record of columns."""
        counts = self.visual_by_layer(shape.layers, pruning)
        return sum(2 * shape.kv_heads * shape.head_dim * (self.text + n) * size for n in counts)


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
