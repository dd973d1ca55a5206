"""Majority votes of a group, and the reward `majority`, which needs no targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mmrl.config.registry import reward
from mmrl.core.choices import choices_in
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import comparable_outcomes, log_metric
from mmrl.rewards.answers import MATH, AnswerForm, comparable

Vote = tuple[str, float]  # an answer, normalized by `comparable`, and its weight


@reward(packages=MATH)
def majority(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    tag: str = "answer",
    form: AnswerForm = "exact",
    confidence: str = "",
) -> list[float | None]:
    """Return 1 if an answer equals the majority answer of its group, else 0 (TTRL, arXiv 2504.16084).

    The majority answer is a pseudo-label. If several answers have the most votes, it is the first of them.
    An empty answer does not vote and gets 0. Our reading: a group without votes has no label, and its rewards
    are None. The metric `majority/share` is the label's fraction of the votes. All outcomes of a prompt vote,
    so use this reward with engines that make one outcome per rollout.

    Args:
        tag: The last block of this tag is compared, or the whole text if there is no such block.
        form: What must be equal. `exact`: texts up to case and space. `text`: also up to articles,
            punctuation and the spelling of numbers up to ten. `number`: the last numbers. `letter`: the
            letters of a multiple choice. `choice`: the choices of the data row. `math`: the formulas.
        confidence: Name of a number that the engine records for every answer, used as weight of its vote
            (SCOPE, arXiv 2512.15146); `vision.generate` records "confidence" with `confidence_top_k`. Answers
            without it, such as demonstrations, do not vote. Empty: every vote counts 1.
    """
    rewards: list[float | None] = [None] * len(outcomes)
    for members, votes in group_votes(prompts, outcomes, tag, form, confidence):
        label, share = elect([vote for vote in votes if vote is not None])
        if not label:
            continue
        log_metric("majority/share", share)
        for i in members:
            rewards[i] = float(vote_of(prompts[i], outcomes[i], tag, form) == label)
    return rewards


def elect(votes: Sequence[Vote]) -> tuple[str, float]:
    """Return the answer with the most votes (the first of equals) and its fraction; ("", 0) without votes."""
    totals: dict[str, float] = {}
    for answer, weight in votes:
        totals[answer] = totals.get(answer, 0.0) + weight
    if not totals:
        return "", 0.0
    label = max(totals, key=lambda answer: totals[answer])
    whole = sum(totals.values())
    return label, totals[label] / whole if whole else 1 / len(totals)


def vote_of(prompt: Prompt, outcome: Outcome, tag: str, form: AnswerForm) -> str:
    """Return the normalized answer of an outcome, to count equal votes."""
    return comparable(outcome.text or "", tag, form, choices_in(prompt.columns))


def group_votes(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    tag: str,
    form: AnswerForm,
    confidence: str,
) -> Iterator[tuple[list[int], list[Vote | None]]]:
    """Yield the outcome indices of every prompt and their votes; None for an outcome without a vote."""
    if confidence and outcomes and not any(confidence in outcome.recorded for outcome in outcomes):
        names = ", ".join(sorted({name for outcome in outcomes for name in outcome.recorded})) or "nothing"
        raise ValueError(
            f"votes are to be weighted by '{confidence}', but of no answer it is recorded ({names} is); set "
            "`confidence_top_k` of the engine vision.generate, or leave `confidence` out"
        )
    for members in comparable_outcomes(prompts):
        votes: list[Vote | None] = []
        for prompt, outcome in ((prompts[i], outcomes[i]) for i in members):
            answer = vote_of(prompt, outcome, tag, form)
            weight = outcome.recorded.get(confidence) if confidence else 1.0
            if weight is not None and not 0 <= weight < math.inf:
                raise ValueError(f"a vote of '{confidence}' {weight} was recorded; it must be at least 0")
            votes.append((answer, weight) if answer and weight is not None else None)
        yield members, votes
