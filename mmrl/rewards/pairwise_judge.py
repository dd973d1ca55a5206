"""A reward by a model that compares the answers of a group with each other, or with a reference."""

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
    """Reward an answer with its win rate against the others of its group, as another model compares them.

    As in Pref-GRPO (arXiv 2508.20751). Every pair is shown in both orders, because judges prefer a place: an
    answer wins with 1 where both say so, and a pair counts 1/2 where they differ or say tie. That costs
    G (G - 1) generations for G distinct answers, 56 for 8; `orders: random` half of them, in an order drawn
    per pair, which is unbiased on average only. Against a reference it is 2 generations an answer. Equal
    answers tie and empty ones lose without being asked about; a judgement that cannot be read counts 1/2,
    and an answer without any that could be read is a fault, as for `judge`. An answer without others has no
    reward. It logs `pairwise_judge/consistency`, the share of pairs with one verdict in both orders,
    `pairwise_judge/first`, how often the first place won among the others (1/2: no preference), and
    `judge/unread`.

    Args:
        engine: As for `judge`.
        policy: As for `judge`.
        against: The other answers of the group, or the `reference`: the recorded answer of the prompt, else
            its target.
        orders: Ask about a pair in `both` orders, or in one that is drawn at `random`.
        tag: As for `judge`.
        reference: Show the target where there is one; never where it is one of the two answers.
        template: As for `judge`; it reads `first` and `second` in place of `answer`, and no scale.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    against: Literal["group", "reference"] = "group"
    orders: Literal["both", "random"] = "both"
    template: str = ""

    def __post_init__(self) -> None:
        known = {"question", "first", "second", "reference", "columns", "mark", "made"}
        source, needed = self.template or PAIRWISE, {"first", "second"}
        self.question = judge_template(source, known, needed, "verdict", "pairwise_judge")
        self.reference = self.reference and self.against == "group"
        self.asker = self.make_asker()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread | None]:
        """Compute the win rate of every outcome; None without another answer."""
        made, pairs = list(outcomes), []
        for members in comparable_outcomes(prompts):
            if self.against == "group":
                pairs += combinations(members, 2)
                continue
            if (known := reference_of(prompts[members[0]], recorded=True)) is not None:
                pairs += [(i, len(made)) for i in members]
                made.append(Outcome(text=known))
        results = self._compare(prompts, made, pairs)
        wins: list[list[float | Unread]] = [[] for _ in made]
        for (i, j), value in zip(pairs, results, strict=True):
            wins[i].append(value)
            wins[j].append(value if isinstance(value, Unread) else 1.0 - value)
        return [_mean(found) if found else None for found in wins[: len(outcomes)]]

    def _compare(
        self, prompts: Sequence[Prompt], made: Sequence[Outcome], pairs: Sequence[tuple[int, int]]
    ) -> list[float | Unread]:
        """Compare pairs of answers: 1 where the first is better, 0 where the second is."""
        numbers = {i: n for members in by_prompt(prompts).values() for n, i in enumerate(members)}
        questions, orders = [], []
        for i, j in pairs:
            place = f"{prompts[i].uid}/{numbers[i]}/{numbers.get(j, 'reference')}"
            orders.append(self._orders(place) if _differ(made[i], made[j], self.tag) else ())
            for swapped in orders[-1]:
                shown = (made[j], made[i]) if swapped else (made[i], made[j])
                questions.append(self._question(f"{place}/{swapped}", prompts[i], shown))
        read = {"a": 1.0, "b": 0.0, "tie": 0.5}
        judged = iter(
            self.asker.ask(questions, "verdict", "A, B or tie", lambda text: read.get(text.lower()))
        )
        results = []
        for (i, j), asked in zip(pairs, orders, strict=True):
            verdicts = [_turned(next(judged), swapped) for swapped in asked]
            results.append(_agreed(verdicts) if verdicts else _without_asking(made[i], made[j], self.tag))
        return results

    def _orders(self, place: str) -> tuple[bool, ...]:
        """Return whether to show a pair swapped: both ways, or one that is drawn."""
        if self.orders == "both":
            return False, True
        return (bool(torch.randint(2, (), generator=self.stream.generator("pairwise_judge", place))),)

    def _question(self, place: str, prompt: Prompt, shown: tuple[Outcome, Outcome]) -> Prompt:
        first, second = (answer_of(outcome, self.tag) for outcome in shown)
        words = {**judge_words(self.stream, prompt, shown, self.reference), "first": first, "second": second}
        return judge_prompt(f"pairwise_judge/{place}", prompt, shown, self.question(words))


def _differ(one: Outcome, other: Outcome, tag: str) -> bool:
    """Whether there is something to compare: two answers that are not empty and not the same text."""
    if is_empty(one, tag) or is_empty(other, tag):
        return False
    return bool(media_of(one) or media_of(other)) or answer_of(one, tag) != answer_of(other, tag)


def _without_asking(one: Outcome, other: Outcome, tag: str) -> float:
    """Compare equal answers, which tie, and empty ones, which lose."""
    return 0.5 + (is_empty(other, tag) - is_empty(one, tag)) / 2


def _turned(verdict: float | Unread, swapped: bool) -> float | Unread:
    return verdict if isinstance(verdict, Unread) or not swapped else 1.0 - verdict


def _agreed(verdicts: Sequence[float | Unread]) -> float | Unread:
    """Combine the verdicts on a pair: what all say, 1/2 where they differ or one could not be read."""
    read = [verdict for verdict in verdicts if not isinstance(verdict, Unread)]
    if not read:
        return verdicts[0]
    if len(verdicts) == 1:
        return read[0]
    if len(read) == 2:
        same = read[0] == read[1]
        log_metric("pairwise_judge/consistency", float(same))
        if not same and 0.5 not in read:
            log_metric("pairwise_judge/first", read[0])  # in the first order the first answer came first
        if same:
            return read[0]
    return 0.5


def _mean(verdicts: Sequence[float | Unread]) -> float | Unread:
    """Average verdicts; one that could not be read counts 1/2, and where all are, there is no mean."""
    if all(isinstance(verdict, Unread) for verdict in verdicts):
        return verdicts[0]
    return fmean(0.5 if isinstance(verdict, Unread) else verdict for verdict in verdicts)
