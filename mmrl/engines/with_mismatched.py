"""Answers to other prompts inside the groups, to measure how far a policy moved where nothing was learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory


@engine
class WithMismatched:
    """Replace the last rollout of every prompt by the first answer to the next prompt, tagged `unrelated`
    (KTO's mismatched pairs, arXiv 2402.01306).

    Prompts follow each other in a ring, as they were asked on this process; a prompt that is alone meets its
    own answer. A prompt that is asked once keeps its answer.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine for one answer less of every prompt, and put the unrelated ones behind
        them."""
        asked = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        wanted = [prompt for uid, prompt in distinct.items() for _ in range(max(1, asked[uid] - 1))]
        rows = self.engine.rollout(wanted)
        first = {row.prompt.uid: row for row in reversed(rows)}
        ring = list(distinct)
        following = dict(zip(ring, [*ring[1:], *ring[:1]], strict=True))
        strange = [self._strange(distinct[uid], first[following[uid]]) for uid in ring if asked[uid] > 1]
        return (*rows, *strange)

    def _strange(self, prompt: Prompt, other: Trajectory) -> Trajectory:
        row = self.policy.encode(prompt, other.outcomes[-1])
        last = row.outcomes[-1]
        told = Outcome(last.text, last.image, last.video, last.times, last.end)
        return replace(row, outcomes=(replace(told, tags={**last.tags, "unrelated": "yes"}),))
