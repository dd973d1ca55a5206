"""A least-recently-used cache with a limit in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class ByteLRU(Generic[T]):
    """A cache of items of up to `limit` bytes in total; the latest item stays even if it is larger.

    Thread-safe. Threads create different items in parallel; if two create the same item, the first is kept.
    """

    limit: int  # bytes
    size: Callable[[T], int]
    used: int = 0  # bytes of all items
    items: OrderedDict[Hashable, T] = field(default_factory=OrderedDict, repr=False)  # least recent first
    _lock: Any = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[type, tuple[int, Callable[[T], int]]]:
        return type(self), (self.limit, self.size)  # a pickled copy is empty

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the item of a key; create it with `make` if it is not cached."""
        with self._lock:
            if key in self.items:
                self.items.move_to_end(key)
                return self.items[key]
        new = make()  # outside of the lock, because `make` may be slow or use the cache
        with self._lock:
            if key not in self.items:  # another thread may have added it meanwhile
                self.items[key] = new
                self.used += self.size(new)
            self.items.move_to_end(key)
            item = self.items[key]
            while len(self.items) > 1 and self.used > self.limit:
                self.used -= self.size(self.items.popitem(last=False)[1])
            return item
