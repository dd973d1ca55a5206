"""Progress inside a training step: loops over batches report it to a display function, if any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Show = Callable[[str, int, int], None]
_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)


def advance(work: str, done: int, total: int) -> None:
    """Report to the display function, if any, that `done` of `total` units of `work` are done."""
    if show := _SHOW.get():
        show(work, done, total)


@contextmanager
def showing(show: Show) -> Iterator[None]:
    """Call `show(work, done, total)` for every report inside the block, in this thread."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)
