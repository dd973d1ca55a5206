"""Keeping what was expensive to make while there is room for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Kept(Generic[T]):
    """Keeps things up to `limit` bytes; what was not asked for longest goes first. The latest always
    stays."""

    limit: int
    size: Callable[[T], int]
    used: int = 0
    things: OrderedDict[Hashable, T] = field(default_factory=OrderedDict, repr=False)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Give what is kept under a key, or make it."""
        if key not in self.things:
            self.things[key] = make()
            self.used += self.size(self.things[key])
            while len(self.things) > 1 and self.used > self.limit:
                self.used -= self.size(self.things.popitem(last=False)[1])
        self.things.move_to_end(key)
        return self.things[key]
