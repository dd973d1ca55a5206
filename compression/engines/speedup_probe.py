"""The engine `speedup_probe`: some rollouts are repeated without acceleration, and timed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from mmrl.compression.engine_base import AcceleratedEngine, AcceleratedEngineWrapper
from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts


@engine
class SpeedupProbe(AcceleratedEngineWrapper):
    """Repeat some rollouts of an accelerated engine without its cache and transforms, and time both.

    Random numbers are the same, so answers differ only where the models do; the repeated answers are
    discarded. Media are decoded and encoded before timing. Metrics: `rollout/seconds`,
    `rollout/exact_seconds`, `rollout/speedup`, `rollout/agreement` (share of equal answers). The step's own
    `time/rollout` includes both.

    Args:
        engine: The engine to wrap, with a cache or transforms.
        at: Index of the first rollout to repeat, from 0.
        every: Rollouts between later repetitions (0: none).
    """

    def __init__(
        self, engine: AcceleratedEngine, *, at: NonNegativeInt = 1, every: NonNegativeInt = 0
    ) -> None:
        if at < 0 or every < 0:
            raise ValueError(f"`at` and `every` count rollouts: 0 or more, not {at} and {every}")
        super().__init__(engine, "speedup_probe")
        self.at, self.every = at, every
        self.calls = 0
        self.metrics: dict[str, float] = {}

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer with the wrapped engine, and on some calls time it against the exact one."""
        since, self.calls = self.calls - self.at, self.calls + 1
        if not prompts or since < 0 or (since % self.every if self.every else since):
            return self.engine.rollout(prompts)
        for prompt in prompts:
            self.policy.prompt_encoder.encode(prompt)
        with self.exactly():
            exact, exact_seconds = self._timed(prompts)
        rows, seconds = self._timed(prompts)
        same = [a.outcomes[-1].text == b.outcomes[-1].text for a, b in zip(rows, exact, strict=True)]
        self.metrics = {
            "rollout/seconds": seconds,
            "rollout/exact_seconds": exact_seconds,
            "rollout/speedup": exact_seconds / seconds,
            "rollout/agreement": sum(same) / len(same),
        }
        return rows

    def _timed(self, prompts: Sequence[Prompt]) -> tuple[Rollouts, float]:
        start = time.perf_counter()
        rows = self.engine.rollout(prompts)
        return rows, time.perf_counter() - start

    def tell(self) -> Mapping[str, float]:
        """Return the metrics of the last repeated rollout, once."""
        metrics, self.metrics = self.metrics, {}
        return metrics
