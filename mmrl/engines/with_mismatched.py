"""Mismatched answers inside sampled groups, to estimate KTO's reference point (arXiv 2402.01306)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory


@engine
class WithMismatched:
    """Replace the last rollout of every prompt by an answer to another prompt (KTO, arXiv 2402.01306).

    It is the first answer to the next prompt, tagged `unrelated`. Prompts follow each other in a ring, in
    their order on this process; a single prompt gets its own answer. A prompt with one rollout keeps it.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample one answer less of every prompt with the wrapped engine, and append the mismatched ones."""
        asked = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        wanted = [prompt for uid, prompt in distinct.items() for _ in range(max(1, asked[uid] - 1))]
        rows = self.engine.rollout(wanted)
        first = {row.prompt.uid: row for row in reversed(rows)}
        ring = list(distinct)
        following = dict(zip(ring, [*ring[1:], *ring[:1]], strict=True))
        mismatched = [
            self._mismatched(distinct[uid], first[following[uid]]) for uid in ring if asked[uid] > 1
        ]
        return (*rows, *mismatched)

    def _mismatched(self, prompt: Prompt, other: Trajectory) -> Trajectory:
        row = self.policy.encode(prompt, other.outcomes[-1])
        last = row.outcomes[-1]
        outcome = Outcome(last.text, last.image, last.video, last.times, last.end)
        return replace(row, outcomes=(replace(outcome, tags={**last.tags, "unrelated": "yes"}),))
