"""The operations and bytes of a prefill, by formula. A multiplication with an addition counts as 2."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.compression.pruning.attention import split_heads
from mmrl.compression.pruning.local_attention import block_keys
from mmrl.compression.pruning.spec import Pruning, Shape


@dataclass(frozen=True)
class Prefill:
    """One row of a call: `text` tokens, of which `before` stand before the last visual one, and rasters (h,
    w) of visual tokens. `kept` are the visual tokens that stay after every cut that chooses, in order."""

    text: int
    before: int
    rasters: tuple[tuple[int, int], ...]
    kept: tuple[int, ...] = ()

    @property
    def visual(self) -> int:
        """Count visual tokens."""
        return sum(h * w for h, w in self.rasters)

    def visual_by_layer(self, layers: int, pruning: Pruning) -> list[int]:
        """Count the visual tokens that every layer holds."""
        kept, here, counts = list(self.kept), self.visual, []
        cuts = list(pruning.cuts)
        for layer in range(layers):
            while cuts and cuts[0].layer == layer:
                here = 0 if cuts.pop(0).choose is None else kept.pop(0)
            counts.append(here)
        return counts

    def operations(self, shape: Shape, pruning: Pruning) -> int:
        """Count what the language model computes, text included and the head not: blocks of the window as
        large as they are computed, causal attention by half. What it takes to choose or merge tokens is not
        in it."""
        counts = self.visual_by_layer(shape.layers, pruning)
        return sum(self._layer(shape, pruning, i, n) for i, n in enumerate(counts))

    def _layer(self, shape: Shape, pruning: Pruning, i: int, n: int) -> int:
        s, split = shape, split_heads(pruning.heads_of(i), shape.heads, shape.kv_heads)
        kept = s.heads if split.kept is None else len(split.kept)
        needed = s.kv_heads if split.needed is None else len(split.needed)
        frozen = i in pruning.frozen
        ffn_units = pruning.ffn_units_of(i)
        inner = s.inner if ffn_units is None else len(ffn_units)
        words = 2 * self.text * s.width * (s.head_dim * 2 * (s.heads + s.kv_heads) + 3 * s.inner)
        sights = 2 * n * s.width * s.head_dim * 2 * (needed + (0 if frozen else kept))
        sights += 0 if frozen else 6 * n * s.width * inner
        return words + sights + 4 * s.head_dim * self._pairs(s, pruning, n, kept, frozen)

    def _pairs(self, s: Shape, pruning: Pruning, n: int, kept: int, frozen: bool) -> int:
        """Count pairs of query and key, over heads."""
        columns = self.text + n
        if not n:
            return s.heads * self.text * (self.text + 1) // 2
        lost = (s.heads - kept) * self.text * columns
        if frozen or not kept:
            return lost + kept * self.text * columns
        if pruning.radius is None:
            return lost + kept * columns * (columns + 1) // 2
        if n < self.visual:
            return lost + kept * (self.text + n) * columns
        near = 0
        for shape in self.rasters:
            blocks, queries, keys = block_keys(*shape, pruning.radius, pruning.causal)
            near += blocks * queries * (keys + self.before)
        return lost + kept * (self.text * columns + near)

    def visual_operations(self, shape: Shape, pruning: Pruning) -> float:
        """Count what visual tokens cost, as arXiv 2410.06169 does: no text, no causal halving, windows
        without the rest of their block."""
        total = 0.0
        for i, n in enumerate(self.visual_by_layer(shape.layers, pruning)):
            if i in pruning.frozen:
                continue
            heads, ffn_units = pruning.heads_of(i), pruning.ffn_units_of(i)
            kept = shape.heads if heads is None else len(heads)
            inner = shape.inner if ffn_units is None else len(ffn_units)
            groups = shape.kv_heads * kept / shape.heads
            total += 4 * n * shape.width * shape.head_dim * (kept + groups)
            total += 4 * n * self.mean_keys(pruning, n) * shape.head_dim * kept + 6 * n * shape.width * inner
        return total

    def mean_keys(self, pruning: Pruning, n: int) -> float:
        """Count the visual keys that a visual token sees, on average; a window counts later neighbours
        too."""
        if pruning.radius is None or n < self.visual or not n:
            return float(n)
        r = pruning.radius
        along = lambda size: sum(min(size, i + r + 1) - max(0, i - r) for i in range(size))
        return sum(along(h) * along(w) for h, w in self.rasters) / n

    def cache_bytes(self, shape: Shape, pruning: Pruning, size: int) -> int:
        """Count the bytes of keys and values, `size` bytes a number; the ledger of columns is not in it."""
        counts = self.visual_by_layer(shape.layers, pruning)
        return sum(2 * shape.kv_heads * shape.head_dim * (self.text + n) * size for n in counts)
