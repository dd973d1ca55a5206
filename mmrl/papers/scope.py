"""SCOPE (arXiv 2512.15146): subgroups of a group's answers vote for labels of their own.

Title: Beyond Majority Voting: Towards Fine-grained and More Reliable Reward Signal for Test-Time
Reinforcement Learning
Formula: r_i = 1[y_i = label of its part]; the size of parts is closest to (1, 1) in mean reward and number of
labels.
Our reading: a size for every prompt where the paper takes one for the batch, and that half of the answers
are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mmrl.config.ranges import Probability
from mmrl.config.registry import reward
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import log_metric
from mmrl.rewards.answers import MATH, AnswerForm
from mmrl.rewards.votes import Vote, elect, group_votes, vote_of


@reward(packages=MATH)
class SubgroupMajority:
    """Return 1 for the majority answer of the outcome's part of the group, else 0 (SCOPE).

    arXiv 2512.15146. The n answers to a prompt are cut into parts of 1, 2, 4, ... answers. Every part elects
    a label among `votes` answers drawn from the whole group, so small parts have more labels. Sizes are
    compared by the mean reward and by the number of distinct labels, both scaled to [0, 1] over the sizes; of
    those that no other beats in both, the closest to (1, 1) is taken. Our readings: a size is chosen for
    every prompt, where the paper takes one for the batch; and the share of answers that draw is half, as the
    paper's 32 of 64. It logs `majority/parts`, the number of parts.

    Args:
        tag: As for `majority`.
        form: As for `majority`.
        confidence: As for `majority`.
        share: Share of the group's answers that a part draws, rounded up.
        quality: Weight of the mean reward in the squared distance; the number of labels has the rest.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        tag: str = "answer",
        form: AnswerForm = "exact",
        confidence: str = "",
        share: Probability = 0.5,
        quality: Probability = 0.7,
    ) -> None:
        self.stream, self.tag, self.confidence = stream, tag, confidence
        self.form: AnswerForm = form
        self.share, self.quality = share, quality

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome; None where no answer of the group can vote."""
        rewards: list[float | None] = [None] * len(outcomes)
        for members, votes in group_votes(prompts, outcomes, self.tag, self.form, self.confidence):
            if not any(votes):
                continue
            answers = [vote_of(prompts[i], outcomes[i], self.tag, self.form) for i in members]
            sizes = [2**k for k in range(len(members).bit_length())]
            labels = [self._labels(prompts[members[0]].uid, votes, size) for size in sizes]
            scored = [[float(a == b) for a, b in zip(answers, listed, strict=True)] for listed in labels]
            means = [sum(found) / len(found) for found in scored]
            distinct = [len(set(listed)) for listed in labels]
            chosen = choose_size(means, distinct, self.quality)
            log_metric("majority/parts", math.ceil(len(members) / sizes[chosen]))
            for i, value in zip(members, scored[chosen], strict=True):
                rewards[i] = value
        return rewards

    def _labels(self, uid: str, votes: Sequence[Vote | None], size: int) -> list[str]:
        """Elect the label of every answer, where `size` neighbours have one in common.

        A part that draws no answer that can vote has the label of the whole group.
        """
        whole = elect([vote for vote in votes if vote is not None])[0]
        labels: list[str] = []
        for at in range(0, len(votes), size):
            generator = self.stream.generator("subgroup_majority", uid, size, at)
            drawn = torch.randperm(len(votes), generator=generator)[: math.ceil(self.share * len(votes))]
            label, _ = elect([vote for i in sorted(drawn.tolist()) if (vote := votes[i]) is not None])
            labels += [label or whole] * len(votes[at : at + size])
        return labels


def choose_size(means: Sequence[float], distinct: Sequence[float], quality: float) -> int:
    """Return the place of the best compromise of mean reward and number of labels; ties to the first."""
    high, wide = (_scaled(values) for values in (means, distinct))
    points = list(zip(high, wide, strict=True))

    def beaten(point: tuple[float, float]) -> bool:
        return any(a >= point[0] and b >= point[1] and (a, b) != point for a, b in points)

    front = [i for i, point in enumerate(points) if not beaten(point)]
    return min(front, key=lambda i: quality * (1 - high[i]) ** 2 + (1 - quality) * (1 - wide[i]) ** 2)


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low + 1e-8) for value in values]
