"""The reward `pairwise_judge`: a model compares the answers of a group with each other or a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Literal

import torch

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import comparable_outcomes, log_metric
from mmrl.rewards.asking import (
    TWO_ANSWERS,
    Judging,
    Unread,
    answer_of,
    is_empty,
    judge_prompt,
    judge_template,
    judge_words,
    media_of,
    reference_of,
)
from mmrl.runtime.scoring import by_prompt

PAIRWISE = f"""\
{TWO_ANSWERS}\
Say in a few sentences which answer is better, whatever its place and its length, then end with \
<verdict>A</verdict>, <verdict>B</verdict> or <verdict>tie</verdict>.
"""


@reward
@dataclass(kw_only=True, eq=False)
class PairwiseJudge(Judging):
    """Reward an answer with its win rate against the other answers of its group, judged by another model.

    This is the reward of Pref-GRPO (arXiv 2508.20751). Every pair is shown in both orders, because judges
    often have a position bias. A win in both orders counts 1; different verdicts and ties count 1/2. The cost
    is G (G - 1) generations for G distinct answers, 56 for 8. `orders: random` shows each pair once in a
    random order: this halves the cost, and the position bias cancels only on average. A comparison with a
    reference costs 2 generations per answer.

    Equal answers tie and empty answers lose without asking the judge. A judgement that cannot be parsed
    counts 1/2; if no judgement of an answer can be parsed, its reward fails, as for `judge`. The only answer
    of a group gets no reward. Metrics: `pairwise_judge/consistency` is the fraction of pairs with the same
    verdict in both orders. `pairwise_judge/first`: of the pairs with different verdicts, the fraction in
    which the answer shown first won (1/2: no bias). `judge/unread` is as for `judge`.

    Args:
        engine: As for `judge`.
        policy: As for `judge`.
        against: `group`: the other answers of the group. `reference`: the recorded answer of the prompt,
            otherwise its target.
        orders: `both`: show each pair in both orders. `random`: show each pair once, in a random order.
        tag: As for `judge`.
        reference: Show the target, if any, unless it is one of the two answers.
        template: As for `judge`, with `first` and `second` in place of `answer`, and no scale.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    against: Literal["group", "reference"] = "group"
    orders: Literal["both", "random"] = "both"
    template: str = ""

    def __post_init__(self) -> None:
        variables = {"question", "first", "second", "reference", "columns", "mark", "made"}
        source, needed = self.template or PAIRWISE, {"first", "second"}
        self.question = judge_template(source, variables, needed, "verdict", "pairwise_judge")
        self.reference = self.reference and self.against == "group"
        self.asker = self.make_asker()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread | None]:
        """Compute the win rate of every outcome; None if there is no other answer."""
        answers, pairs = list(outcomes), []  # answers: the outcomes, then the references
        for members in comparable_outcomes(prompts):
            if self.against == "group":
                pairs += combinations(members, 2)
                continue
            if (reference := reference_of(prompts[members[0]], recorded=True)) is not None:
                pairs += [(i, len(answers)) for i in members]
                answers.append(Outcome(text=reference))
        results = self._compare(prompts, answers, pairs)
        wins: list[list[float | Unread]] = [[] for _ in answers]
        for (i, j), value in zip(pairs, results, strict=True):
            wins[i].append(value)
            wins[j].append(value if isinstance(value, Unread) else 1.0 - value)
        return [_mean(verdicts) if verdicts else None for verdicts in wins[: len(outcomes)]]

    def _compare(
        self, prompts: Sequence[Prompt], answers: Sequence[Outcome], pairs: Sequence[tuple[int, int]]
    ) -> list[float | Unread]:
        """Return a result per pair: 1 if the first answer is better, 0 if the second is, 1/2 for a tie."""
        numbers = {i: n for members in by_prompt(prompts).values() for n, i in enumerate(members)}
        questions, orders = [], []
        for i, j in pairs:
            place = f"{prompts[i].uid}/{numbers[i]}/{numbers.get(j, 'reference')}"
            orders.append(self._orders(place) if _differ(answers[i], answers[j], self.tag) else ())
            for swapped in orders[-1]:
                shown = (answers[j], answers[i]) if swapped else (answers[i], answers[j])
                questions.append(self._question(f"{place}/{swapped}", prompts[i], shown))
        values = {"a": 1.0, "b": 0.0, "tie": 0.5}
        judged = iter(
            self.asker.ask(questions, "verdict", "A, B or tie", lambda text: values.get(text.lower()))
        )
        results = []
        for (i, j), swaps in zip(pairs, orders, strict=True):
            verdicts = []
            for swapped in swaps:
                verdict = next(judged)
                verdicts.append(1.0 - verdict if swapped and not isinstance(verdict, Unread) else verdict)
            # Without asking the judge, equal answers tie and an empty answer loses.
            empty = is_empty(answers[j], self.tag) - is_empty(answers[i], self.tag)
            results.append(_agreed(verdicts) if verdicts else 0.5 + empty / 2)
        return results

    def _orders(self, place: str) -> tuple[bool, ...]:
        """Return a flag for each presentation of a pair: whether the two answers are swapped."""
        if self.orders == "both":
            return False, True
        return (bool(torch.randint(2, (), generator=self.stream.generator("pairwise_judge", place))),)

    def _question(self, place: str, prompt: Prompt, shown: tuple[Outcome, Outcome]) -> Prompt:
        first, second = (answer_of(outcome, self.tag) for outcome in shown)
        words = {**judge_words(self.stream, prompt, shown, self.reference), "first": first, "second": second}
        return judge_prompt(f"pairwise_judge/{place}", prompt, shown, self.question(words))


def _differ(one: Outcome, other: Outcome, tag: str) -> bool:
    """Whether to ask the judge: neither answer is empty, and their texts differ or they have media."""
    if is_empty(one, tag) or is_empty(other, tag):
        return False
    return bool(media_of(one) or media_of(other)) or answer_of(one, tag) != answer_of(other, tag)


def _agreed(verdicts: Sequence[float | Unread]) -> float | Unread:
    """Combine the verdicts on a pair: their common value, or 1/2 if they differ or one is unparsed."""
    read = [verdict for verdict in verdicts if not isinstance(verdict, Unread)]
    if not read:
        return verdicts[0]
    if len(verdicts) == 1:
        return read[0]
    if len(read) == 2:
        same = read[0] == read[1]
        log_metric("pairwise_judge/consistency", float(same))
        if not same and 0.5 not in read:
            log_metric("pairwise_judge/first", read[0])
        if same:
            return read[0]
    return 0.5


def _mean(verdicts: Sequence[float | Unread]) -> float | Unread:
    """Average verdicts; unparsed verdicts count 1/2. If all are unparsed, return the first."""
    if all(isinstance(verdict, Unread) for verdict in verdicts):
        return verdicts[0]
    return fmean(0.5 if isinstance(verdict, Unread) else verdict for verdict in verdicts)
