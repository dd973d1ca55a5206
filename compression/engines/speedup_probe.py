"""What a cheaper engine saves: some collections are made once more on the exact one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from mmrl.compression.engine_base import Cheap, Watching
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts


@engine
class SpeedupProbe(Watching):
    """Make the collection number `at` a second time without cache and transforms, and tell the seconds of
    both.

    From there on every `every`-th one (0: no other). Random draws are the same, so answers differ only where
    the models do. Media are decoded and encoded before the clock runs. What was made the second time is
    forgotten. Metrics: `rollout/seconds`, `rollout/exact_seconds`, `rollout/speedup`,
    `rollout/agreement`. The step's own `time/rollout` holds both. It wraps an engine with a cache or
    transforms.
    """

    def __init__(self, engine: Cheap, *, at: NonNegativeInt = 1, every: NonNegativeInt = 0) -> None:
        if at < 0 or every < 0:
            raise ValueError(f"`at` and `every` count collections: 0 or more, not {at} and {every}")
        super().__init__(engine, "speedup_probe")
        self.at, self.every = at, every
        self.made = 0  # collections
        self.found: dict[str, float] = {}

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine, and sometimes time it against the exact one."""
        behind, self.made = self.made - self.at, self.made + 1
        if not prompts or behind < 0 or (behind % self.every if self.every else behind):
            return self.engine.rollout(prompts)
        for prompt in prompts:
            self.policy.prompt_encoder.encode(prompt)
        with self.exactly():
            exact, exact_seconds = self._timed(prompts)
        rows, seconds = self._timed(prompts)
        same = [one.outcomes[-1].text == two.outcomes[-1].text for one, two in zip(rows, exact, strict=True)]
        self.found = {
            "rollout/seconds": seconds,
            "rollout/exact_seconds": exact_seconds,
            "rollout/speedup": exact_seconds / seconds,
            "rollout/agreement": sum(same) / len(same),
        }
        return rows

    def _timed(self, prompts: Sequence[Prompt]) -> tuple[Rollouts, float]:
        began = time.perf_counter()
        rows = self.engine.rollout(prompts)
        return rows, time.perf_counter() - began

    def tell(self) -> Mapping[str, float]:
        """Give what was measured, once."""
        found, self.found = self.found, {}
        return found
