"""Keeping what was expensive to make while there is room for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class Kept(Generic[T]):
    """Keeps things up to `limit` bytes; what was not asked for longest goes first. The latest always
    stays.

    Threads may share it. They make different things at the same time; of one thing made twice, the first
    stays.
    """

    limit: int
    size: Callable[[T], int]
    used: int = 0
    things: OrderedDict[Hashable, T] = field(default_factory=OrderedDict, repr=False)
    _lock: Any = field(default_factory=Lock, init=False, repr=False, compare=False)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Give what is kept under a key, or make it."""
        with self._lock:
            if key in self.things:
                self.things.move_to_end(key)
                return self.things[key]
        made = make()  # outside of the lock: it may take long, and may ask for other things
        with self._lock:
            if key not in self.things:
                self.things[key] = made
                self.used += self.size(made)
            self.things.move_to_end(key)
            thing = self.things[key]
            while len(self.things) > 1 and self.used > self.limit:
                self.used -= self.size(self.things.popitem(last=False)[1])
            return thing
