"""Answers that are written with the adapter of their role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.config.registry import engine
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Rollouts, Trajectory


@engine
class ByRole:
    """Answer every prompt with the adapter of the role that its tag `role` names.

    The policy is `vision.tokens` with `roles`. It wraps any engine that samples from the policy.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy = engine, engine.policy
        self.roles: Any = getattr(engine.policy, "roles", None)
        if self.roles is None:
            raise ConfigError(
                "the engine `vision.by_role` needs a policy with an adapter for each role; set `roles` and "
                "`lora_rank` of `vision.tokens`"
            )

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order; those of one role together. Rows that the engine adds come last."""
        numbers = [self.roles.of(prompt.tags, prompt.uid) for prompt in prompts]
        rows: dict[int, Trajectory] = {}
        added: list[Trajectory] = []
        for number in sorted(set(numbers)):
            places = [place for place, found in enumerate(numbers) if found == number]
            with self.roles.acting(number):
                made = self.engine.rollout([prompts[place] for place in places])
            rows |= dict(zip(places, made, strict=False))
            added += made[len(places) :]
        return (*(rows[place] for place in range(len(prompts))), *added)
