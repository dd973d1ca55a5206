"""Base of engine wrappers that measure an accelerated engine against its policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from mmrl.core.types import Prompt, Rollouts


class ModelOwner(Protocol):
    """Whatever answers prompts with a model."""

    model: nn.Module


class AcceleratedEngine(Protocol):
    """An engine that may answer with a compressed cache or a transformed model instead of its policy's."""

    policy: Any
    rollout_policy: ModelOwner  # what answers: the policy, or a transformed copy of it
    cache: Callable | None  # makes the cache of keys and values; None for the full one

    def exactly(self) -> AbstractContextManager:
        """Answer as the policy itself does while the context lasts."""

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order."""


class AcceleratedEngineWrapper:
    """An engine that passes prompts on to an accelerated engine, for subclasses that measure it."""

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: AcceleratedEngine, name: str) -> None:
        if not is_accelerated(engine):
            raise ValueError(
                f"`{name}` compares an accelerated engine with its policy, but the engine that it wraps has "
                "neither a cache nor a transform"
            )
        self.engine, self.policy, self.exactly = engine, engine.policy, engine.exactly

    @property
    def rollout_policy(self) -> ModelOwner:
        """What answers prompts."""
        return self.engine.rollout_policy

    @property
    def cache(self) -> Callable | None:
        """The maker of the cache of keys and values, None for the full one."""
        return self.engine.cache


def is_accelerated(engine: AcceleratedEngine) -> bool:
    """Whether an engine has a cache or a model of its own at the moment."""
    return engine.cache is not None or engine.rollout_policy is not engine.policy
