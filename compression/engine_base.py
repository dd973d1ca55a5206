"""What is asked of an engine that may be cheaper than its policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from mmrl.core.types import Prompt, Rollouts


class Speaking(Protocol):
    """Whom an engine lets answer."""

    model: nn.Module


class Cheap(Protocol):
    """An engine with a cache or a model of its own."""

    policy: Any
    rollout_policy: Speaking  # who answers: the policy, or it made cheaper
    cache: Callable | None

    def exactly(self) -> AbstractContextManager:
        """Answer as the policy itself does for a while."""

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order."""


class Watching:
    """An engine around one that is cheaper than its policy: answers as it does, and measures."""

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Cheap, name: str) -> None:
        if not is_cheap(engine):
            raise ValueError(
                f"`{name}` measures what is cheaper than the policy, but the engine it wraps names neither a "
                "cache nor a transform"
            )
        self.engine, self.policy, self.exactly = engine, engine.policy, engine.exactly

    @property
    def rollout_policy(self) -> Speaking:
        """Who answers."""
        return self.engine.rollout_policy

    @property
    def cache(self) -> Callable | None:
        """What holds keys and values."""
        return self.engine.cache


def is_cheap(engine: Cheap) -> bool:
    """Tell whether an engine has a cache or a model of its own, as it stands."""
    return engine.cache is not None or engine.rollout_policy is not engine.policy
