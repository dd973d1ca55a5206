"""Rewards without labels: agreement with the majority answer of the group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from mmrl.config.ranges import Probability
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import comparable_outcomes, log_metric
from mmrl.core.choices import choices_in
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.answers import MATH, AnswerForm, comparable

Vote = tuple[str, float]  # an answer as `comparable` writes it, and its weight


@reward(packages=MATH)
def majority(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    tag: str = "answer",
    form: AnswerForm = "exact",
    confidence: str = "",
) -> list[float | None]:
    """Return 1 for the majority answer of the group, a pseudo-label, else 0 (TTRL, arXiv 2504.16084).

    Of answers with equally many votes the one that came first is the label. An answer with nothing to compare
    does not vote and earns 0. Our reading: a group without votes has no label, None. It logs the metric
    `majority/share`, the label's share of the votes. All outcomes of a prompt vote, so it belongs to engines
    that make one per rollout.

    Args:
        tag: Block of the answer whose last one is compared; without one the whole text is.
        form: What is equal: `exact` up to case and space, `text` also up to articles, punctuation and how
            numbers up to ten are written, `number` compares the last number, `letter` that of a multiple
            choice, `choice` the row's choices, `math` formulas.
        confidence: Name of what the engine recorded of every answer, by which votes are weighted (SCOPE,
            arXiv 2512.15146); `vision.generate` records "confidence" with `confidence_top_k`. Answers without
            it, such as demonstrations, do not vote. Empty: every vote counts 1.
    """
    rewards: list[float | None] = [None] * len(outcomes)
    for members, votes in _group_votes(prompts, outcomes, tag, form, confidence):
        label, share = elect([vote for vote in votes if vote is not None])
        if not label:
            continue
        log_metric("majority/share", share)
        for i in members:
            rewards[i] = float(_answer(prompts[i], outcomes[i], tag, form) == label)
    return rewards


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
        for members, votes in _group_votes(prompts, outcomes, self.tag, self.form, self.confidence):
            if not any(votes):
                continue
            answers = [_answer(prompts[i], outcomes[i], self.tag, self.form) for i in members]
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


def elect(votes: Sequence[Vote]) -> tuple[str, float]:
    """Return the answer of most votes, ties to the first seen, and its share; empty and 0 without votes."""
    totals: dict[str, float] = {}
    for answer, weight in votes:
        totals[answer] = totals.get(answer, 0.0) + weight
    if not totals:
        return "", 0.0
    label = max(totals, key=lambda answer: totals[answer])
    whole = sum(totals.values())
    return label, totals[label] / whole if whole else 1 / len(totals)


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


def _answer(prompt: Prompt, outcome: Outcome, tag: str, form: AnswerForm) -> str:
    return comparable(outcome.text or "", tag, form, choices_in(prompt.columns))


def _group_votes(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    tag: str,
    form: AnswerForm,
    confidence: str,
) -> Iterator[tuple[list[int], list[Vote | None]]]:
    """Yield, for every prompt, the places of its outcomes and their votes; None for one that has none."""
    if confidence and outcomes and not any(confidence in outcome.recorded for outcome in outcomes):
        known = ", ".join(sorted({name for outcome in outcomes for name in outcome.recorded})) or "nothing"
        raise ValueError(
            f"votes are to be weighted by '{confidence}', but of no answer it is recorded ({known} is); set "
            "`confidence_top_k` of the engine vision.generate, or leave `confidence` out"
        )
    for members in comparable_outcomes(prompts):
        votes: list[Vote | None] = []
        for prompt, outcome in ((prompts[i], outcomes[i]) for i in members):
            answer = _answer(prompt, outcome, tag, form)
            weight = outcome.recorded.get(confidence) if confidence else 1.0
            if weight is not None and not 0 <= weight < math.inf:
                raise ValueError(f"a vote of '{confidence}' {weight} was recorded; it must be at least 0")
            votes.append((answer, weight) if answer and weight is not None else None)
        yield members, votes
