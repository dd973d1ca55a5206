"""ReMax (arXiv 2310.10505): the baseline is the reward of the greedy answer.

Title: ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language
Models
Formula: A = r(x, y) - r(x, y_greedy).
Our reading: none in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.engines.generate import Generate

TAG = "greedy"


@engine(scope="vision", sets_tags={TAG})
class WithGreedy:
    """Answer every prompt once more with the most likely tokens, as a baseline (ReMax, arXiv 2310.10505).

    This answer is tagged `greedy`, comes on top of those asked for, and is off-policy; `greedy_baseline`
    compares the others with it and takes it out of learning. Evaluations get none. It wraps
    `vision.generate`.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Generate) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, and every distinct prompt greedily after them."""
        rows = self.engine.rollout(prompts)
        if self.engine.stream.purpose != "train":
            return rows
        greedy = copy(self.engine)  # with the same model and cache
        greedy.temperature = 0.0
        distinct = {prompt.uid: prompt for prompt in prompts}
        return (
            *rows,
            *(
                replace(
                    row,
                    outcomes=tuple(replace(o, tags={**o.tags, TAG: "yes"}) for o in row.outcomes),
                    on_policy=False,
                )
                for row in greedy.rollout(list(distinct.values()))
            ),
        )
