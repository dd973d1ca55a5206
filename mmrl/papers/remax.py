"""ReMax (arXiv 2310.10505): the baseline is the reward of the greedy answer.

Title: ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language
Models
Formula: A = r(x, y) - r(x, y_greedy).
Our reading: a group whose greedy answer has no reward is not learned from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mmrl.config.ranges import Tag, Tags
from mmrl.config.registry import advantage, engine
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.decoding.continuing import GreedyEngine

TAG = "greedy"


@engine(scope="vision", sets_tags={TAG})
class WithGreedy:
    """Answer every prompt once more with the most likely tokens, as a baseline (ReMax, arXiv 2310.10505).

    This answer is tagged `greedy`, comes on top of those asked for, and is off-policy; `greedy_baseline`
    compares the others with it and takes it out of learning. Evaluations get none. It wraps
    `vision.generate` or `vision.vllm`.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: GreedyEngine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, and every distinct prompt greedily after them."""
        rows = self.engine.rollout(prompts)
        if self.engine.stream.purpose != "train":
            return rows
        distinct = {prompt.uid: prompt for prompt in prompts}
        return (
            *rows,
            *(
                replace(
                    row,
                    outcomes=tuple(replace(o, tags={**o.tags, TAG: "yes"}) for o in row.outcomes),
                    on_policy=False,
                )
                for row in self.engine.greedily().rollout(list(distinct.values()))
            ),
        )


@advantage
def greedy_baseline(table: RewardTable, *, tag: Tag = TAG, by: Tags = ("group",)) -> RewardTable:
    """Subtract the reward of the greedy answer, which is not learned from (ReMax, arXiv 2310.10505).

    Greedy answers are the rows with a tag, which `vision.with_greedy` sets; several count as their mean. Our
    reading: a group whose greedy answer has no reward is not learned from. Put it after `total`.

    Args:
        tag: Tag of the greedy answers.
        by: Keys that define a group.
    """
    if not len(table):
        return table
    if tag not in table.ids:
        raise ValueError(
            f"`greedy_baseline` wants rows tagged '{tag}', and no row is; add the engine "
            "`vision.with_greedy` after `vision.generate`"
        )
    greedy = table.ids[tag] != 0
    answers = table.valid & greedy[:, None] & (table.ids["place"] == table.last[:, None])[:, None]
    baseline = GroupStatistics(table.values, answers, table.index(by))
    known = baseline.count() > 0
    return table.replace(
        values=torch.where(known, table.values - baseline.mean(), 0.0),
        valid=table.valid & known,
        learn=table.learn & ~greedy,
    )
