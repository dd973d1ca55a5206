"""Engines that take answers from the data set: recorded ones, demonstrations, and those of other prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine, Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, reading


@engine
class Offline:
    """Use recorded answers as rollouts: demonstrations, or the rows of preference pairs.

    The answers of a prompt are used in order, starting over after the last. With `shuffle` the order is
    drawn anew for every collection, so that of many answers any may be compared (GDRO, arXiv 2601.02036,
    ranks 6 of 16).
    """

    notes: frozenset[str] = frozenset()
    reads_answers = True
    needs_answers = True  # every prompt has some

    def __init__(self, policy: Policy, *, stream: Stream, shuffle: bool = False) -> None:
        self.policy, self.stream, self.shuffle = policy, stream, shuffle

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Encode one answer for every entry of `prompts`."""
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            count = len(prompt.answers)
            if not count:
                raise ValueError(
                    f"prompt '{prompt.uid}' has no recorded answers; the engine `offline` needs them"
                )
            place = asked.get(prompt.uid, 0)
            asked[prompt.uid] = (place + 1) % count
            if self.shuffle:  # the key has no count: all rollouts of a prompt walk through one order
                place = torch.randperm(count, generator=self.stream.generator(prompt.uid)).tolist()[place]
            with reading(prompt):
                rows.append(self.policy.encode(prompt, prompt.answers[place]))
        return tuple(rows)


@engine
class WithDemos:
    """Replace the last `per_group` rollouts of every prompt by its recorded answers, marked as off-policy.

    A prompt without recorded answers keeps all its rollouts. The replaced ones are never generated.
    """

    notes: frozenset[str] = frozenset()  # a demonstration was not sampled: it has no log-probabilities
    reads_answers = True

    def __init__(self, engine: Engine, *, per_group: PositiveInt = 1) -> None:
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
            # Over again where there are too few.
            self.policy.encode(prompt, prompt.answers[turn % len(prompt.answers)])
            for uid, prompt in distinct.items()
            for turn in range(shown[uid])
        ]
        return sampled + tuple(demos)


@engine(sets_tags={"unrelated"})
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
        first = {row.prompt.uid: row.outcomes[-1] for row in reversed(rows)}  # of equal keys the last stays
        ring = list(distinct)
        mismatched = []
        for uid, following in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            if asked[uid] > 1:
                row = self.policy.encode(distinct[uid], first[following])
                last = row.outcomes[-1]
                tags = {**last.tags, "unrelated": "yes"}
                # Without `recorded`: those rewards belong to the other prompt.
                outcome = Outcome(last.text, last.image, last.video, last.times, last.end, tags=tags)
                mismatched.append(replace(row, outcomes=(outcome,)))
        return (*rows, *mismatched)
