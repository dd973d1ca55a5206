"""What one layer of a cache holds: parts of the prompt that rows share, and what came since, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from mmrl.kv_cache.blocks import Block, Exact, spread
from mmrl.kv_cache.layout import Layout, Part

ROOM = 16  # tokens by which a growing block grows


class Since(Protocol):
    """What came behind the prompt. `keys` and `values` list parts whose rows are those of the batch."""

    length: int
    nbytes: int

    def append(self, keys: Tensor, values: Tensor) -> None: ...
    def keys(self) -> list[Part]: ...
    def values(self) -> list[Part]: ...
    def select(self, rows: Tensor) -> None: ...
    def crop(self, length: int) -> None: ...  # keep tokens before this slot


class Recipe(Protocol):
    """How a prompt is held. `watches` says that queries must be seen before it can be, `calibrates` that
    visual scores are changed."""

    watches: bool
    calibrates: bool

    def store(self, keys: Tensor, values: Tensor, layout: Layout) -> tuple[list[Part], list[Part], Since]: ...
    def calibrate(self, scores: Tensor, valid: Tensor) -> Tensor: ...


class Plain:
    """What a recipe is that leaves scores as they are."""

    calibrates = False

    def calibrate(self, scores: Tensor, valid: Tensor) -> Tensor:
        """Leave scores as they are."""
        return scores


class Tail:
    """Tokens behind a prompt as they came, from slot `start` on."""

    def __init__(self, like: Tensor, start: int, rows: int) -> None:
        self.start = self.length = start
        self._keys, self._values = (like.new_empty(rows, like.shape[1], 0, like.shape[3]) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Measure what is held, room to grow included."""
        return sum(x.numel() * x.element_size() for x in (self._keys, self._values))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take up tokens (B, h, t, D)."""
        at, end = self.length - self.start, self.length - self.start + keys.shape[2]
        if end > self._keys.shape[2]:
            more = -(-end // ROOM) * ROOM - self._keys.shape[2]
            self._keys, self._values = (
                torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (self._keys, self._values)
            )
        for held, x in ((self._keys, keys), (self._values, values)):
            held.narrow(2, at, end - at).copy_(x)
        self.length += end - at

    def keys(self) -> list[Part]:
        """List the keys."""
        return self._part(self._keys)

    def values(self) -> list[Part]:
        """List the values."""
        return self._part(self._values)

    def _part(self, x: Tensor) -> list[Part]:
        held = Exact(x.narrow(2, 0, self.length - self.start))
        return [Part(held, _count(self.start, self.length, x.device), shared=False, name="tail")]

    def select(self, rows: Tensor) -> None:
        """Keep rows, in this order."""
        self._keys, self._values = self._keys[rows], self._values[rows]

    def crop(self, length: int) -> None:
        """Forget what stands at or behind a slot."""
        self.start, self.length = min(self.start, length), min(self.length, length)


@lru_cache(maxsize=4)
def _count(start: int, end: int, device: torch.device) -> Tensor:
    """Count slots (1, n); all layers ask for the same in a step."""
    return torch.arange(start, end, device=device)[None]


@dataclass(eq=False)
class Held:
    """Keys and values of one layer. `fused` hands itself to the attention instead of dense tensors."""

    recipe: Recipe
    layout: Layout
    fused: bool
    heads: int
    size: int
    shared: tuple[list[Part], list[Part]] | None = None
    since: Since | None = None
    fresh: tuple[Tensor, Tensor] | None = None  # a prompt whose queries are still awaited
    length: int = 0

    @property
    def nbytes(self) -> int:
        """Measure everything that is held but the slots of shared parts, which layers may share as well."""
        parts = sum(part.block.nbytes for side in self.shared or () for part in side)
        fresh = sum(x.numel() * x.element_size() for x in self.fresh or ())
        return parts + fresh + (self.since.nbytes if self.since else 0)

    @property
    def slots(self) -> dict[int, int]:
        """Measure the slots of shared parts, in bytes, by where they lie."""
        parts = [part for side in self.shared or () for part in side]
        return {part.slots.data_ptr(): part.slots.numel() * part.slots.element_size() for part in parts}

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor | Held, Tensor | Held]:
        """Take up (B, h, t, D) keys and values; gives what attention reads, itself twice where it reads
        codes."""
        self._check(keys)
        if self.length:
            self.since.append(keys, values)
            self.length += keys.shape[2]
            return (self, self) if self.fused else self.dense()
        times = (
            self.layout.begin(len(keys), keys.shape[2], keys.device)
            if not self.layout.length
            else len(keys) // len(self.layout.real)
        )
        self.length = keys.shape[2]
        once = keys[::times], values[::times]
        if self.recipe.watches:
            self.fresh = once
            return self, self
        self.store(*once)
        return keys, values

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Put the prompt away."""
        *shared, self.since = self.recipe.store(keys, values, self.layout)
        self.shared, self.fresh = tuple(shared), None

    def parts(self) -> tuple[list[Part], list[Part]]:
        """List everything that is held of keys, and of values."""
        keys, values = self.shared
        return [*keys, *self.since.keys()], [*values, *self.since.values()]

    def dense(self) -> tuple[Tensor, Tensor]:
        """Give all keys and values, (B, h, length, D) each, in the model's order: what any attention
        reads."""
        return tuple(
            sum(spread(part.dense(self.layout), part.rows(self.layout), self.length) for part in side)
            for side in self.parts()
        )

    def select(self, rows: Tensor, prompts: Tensor | None) -> None:
        """Keep rows, in this order; `prompts` are those that are still read, None for all."""
        if self.shared is None:
            return
        if prompts is not None:
            self._move(lambda slots: slots[prompts], lambda block: block.select(prompts))
        self.since.select(rows)

    def crop(self, num: int) -> None:
        """Forget the last `num` slots."""
        if not num or self.shared is None:
            return
        self.length = max(0, self.length - num)
        if self.length < self.layout.length:
            self._move(lambda slots: slots.masked_fill(slots >= self.length, -1), lambda block: block)
        self.since.crop(self.length)

    def _move(self, slots: Callable[[Tensor], Tensor], block: Callable[[Block], Block]) -> None:
        """Change all shared parts. Keys and values that stood in the same slots go on sharing them."""
        moved = {id(part.slots): slots(part.slots) for side in self.shared for part in side}
        self.shared = tuple(
            [replace(part, block=block(part.block), slots=moved[id(part.slots)]) for part in side]
            for side in self.shared
        )

    def _check(self, keys: Tensor) -> None:
        if keys.shape[1] != self.heads or keys.shape[3] != self.size:
            raise ValueError(
                f"this cache was made for {self.heads} key-value heads of size {self.size}, but the model "
                f"gives {keys.shape[1]} of size {keys.shape[3]}; make the cache from this model's config"
            )
        if keys.requires_grad and torch.is_grad_enabled():
            raise ValueError("no gradient flows through codes; use this cache under torch.no_grad()")
