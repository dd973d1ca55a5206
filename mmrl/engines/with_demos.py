"""Demonstrations inside sampled groups (TempSamp-R1, arXiv 2509.18056)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Rollouts


@engine
class WithDemos:
    """Replace the last `per_group` rollouts of every prompt by its recorded answers, marked as off-policy.

    A prompt without recorded answers keeps all its rollouts. The replaced ones are never generated.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, *, per_group: PositiveInt = 1) -> None:
        if per_group < 1:
            raise ValueError(f"`per_group` must be at least 1, not {per_group}")
        self.engine, self.policy, self.per_group = engine, engine.policy, per_group

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample the remaining rollouts with the wrapped engine, and append the demonstrations."""
        asked = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        shown = {
            uid: min(self.per_group, asked[uid]) if prompt.answers else 0 for uid, prompt in distinct.items()
        }
        wanted = [prompt for uid, prompt in distinct.items() for _ in range(asked[uid] - shown[uid])]
        sampled = self.engine.rollout(wanted) if wanted else ()
        demos = [
            self.policy.encode(prompt, prompt.answers[turn % len(prompt.answers)])
            for uid, prompt in distinct.items()
            for turn in range(shown[uid])
        ]
        return sampled + tuple(demos)
