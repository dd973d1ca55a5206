"""Pending requests for rollouts, whose results were not fetched yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mmrl.core.types import Prompt

T = TypeVar("T", bound=tuple[Any, ...])


def taken(
    pending: deque[T], step: int, prompts: Sequence[Prompt], ask: Callable[[Sequence[Prompt]], None]
) -> T:
    """Remove and return the pending request of a step for these prompt objects, or a new request.

    A request is a tuple that starts with its step and its prompts. `ask` makes a request and appends it to
    `pending`. Requests before the returned one are dropped, as the run has skipped their prompts.
    """
    for place, (asked, listed, *_) in enumerate(pending):
        if asked == step and [*map(id, listed)] == [*map(id, prompts)]:
            for _ in range(place):
                pending.popleft()
            return pending.popleft()
    ask(prompts)
    return pending.pop()
