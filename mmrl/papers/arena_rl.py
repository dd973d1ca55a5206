"""ArenaRL (arXiv 2601.06487): a judge ranks the answers of a group in a tournament.

Title: ArenaRL: Scaling RL for Open-Ended Agents via Tournament-based Relative Ranking
Formula: reward = (r_max - r) / (r_max - 1), with the rank r from 1 after a seeded bracket.
Our reading: equal answers share a rank, empty answers come last, unreadable comparisons are ties, and each
pair is compared in both orders.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from mmrl.config.loading import ConfigError
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
)

Pair = tuple[int, int]
Scores = tuple[float, float]  # of the two players of a match
# A tournament yields the matches of each round, is sent their scores, and returns one standing per player;
# larger is better.
Matches = Generator[list[Pair], list[Scores], list[float]]

SCORES = re.compile(r"(-?\d+(?:\.\d+)?)[\s,]+(-?\d+(?:\.\d+)?)")
TOURNAMENT = f"""\
{TWO_ANSWERS}\
Say in a few sentences how good each answer is, whatever its place and its length, then end with a score of \
each from {{{{ low }}}} (wrong or empty) to {{{{ high }}}} (right and complete), that of answer A first, \
written as <scores>N M</scores>.
"""


@reward
@dataclass(kw_only=True, eq=False)
class Tournament(Judging):
    """Reward an answer with its rank in a tournament of its group, decided by a judge (ArenaRL).

    arXiv 2601.06487. The best answer of a group earns 1, the worst 0, others (r_max - r) / (r_max - 1) with
    the rank r from 1. Single elimination costs up to 2 (G - 1) comparisons of G answers, `round_robin`
    G (G - 1) / 2. Our readings: `orders: both` asks about each pair twice and averages (the paper asks once);
    equal answers play as one and share their rank; empty answers come last without playing; a comparison
    that cannot be read is a tie, and an answer without any readable comparison is a fault, as for `judge`. A
    group of one has no reward (the paper divides by zero). It logs `judge/unread` and
    `tournament/consistency`, the share of comparisons in which both orders prefer the same answer.

    Args:
        engine: As for `judge`.
        policy: As for `judge`.
        form: `anchor` compares all answers with the first; `single_elimination` seeds a bracket with the
            results of `anchor`; `round_robin` compares all pairs.
        scale: Lowest and highest score; the judge's numbers outside are not read.
        orders: Ask about a pair in `both` orders, or in one `random` order.
        tag: As for `judge`.
        reference: Show the target to the judge if there is one.
        template: As for `judge`, with `first` and `second` instead of `answer`; it must ask for <scores>.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    form: Literal["anchor", "single_elimination", "round_robin"] = "single_elimination"
    scale: tuple[float, float] = (1.0, 10.0)
    orders: Literal["both", "random"] = "both"
    template: str = ""

    def __post_init__(self) -> None:
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"`scale` of a tournament must rise, not be {list(self.scale)}")
        words = {"question", "first", "second", "reference", "columns", "low", "high", "mark", "made"}
        template, needed = self.template or TOURNAMENT, {"first", "second"}
        self.question = judge_template(template, words, needed, "scores", "tournament")
        self.asker = self.make_asker()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread | None]:
        """Compute the reward of every outcome; None without another answer."""
        rewards: list[float | Unread | None] = [None] * len(outcomes)
        groups = [members for members in comparable_outcomes(prompts) if len(members) > 1]
        players = [distinct_answers(outcomes, members, self.tag) for members in groups]
        tournaments = [FORMS[self.form](len(listed)) for listed in players]
        # Random orders must not depend on the other groups of this process; a prompt has a group per place.
        places, labels = Counter[str](), list[str]()
        for members in groups:
            uid = prompts[members[0]].uid
            labels.append(f"{uid}/place-{places[uid]}" if places[uid] else uid)
            places[uid] += 1

        def compare(matches: Sequence[tuple[int, Pair]]) -> list[Scores | Unread]:
            """Compare pairs of players, each pair with the index of its tournament."""
            rows = [(players[t][i][0], players[t][j][0]) for t, (i, j) in matches]
            names = [f"{labels[t]}/{i}/{j}" for t, (i, j) in matches]
            return self._compare(prompts, outcomes, rows, names)

        standings, unread = run_tournaments(tournaments, compare)
        for number, (members, listed) in enumerate(zip(groups, players, strict=True)):
            points = {i: -math.inf for i in members}  # empty answers come last
            for player, rows in enumerate(listed):
                points |= {i: standings[number][player] for i in rows}
            values = from_ranks([points[i] for i in members])
            for i, value in zip(members, values, strict=True):
                rewards[i] = value
            for player, fault in unread[number].items():
                for i in listed[player]:
                    rewards[i] = fault
        return rewards

    def _compare(
        self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome], pairs: Sequence[Pair],
        names: Sequence[str],
    ) -> list[Scores | Unread]:  # fmt: skip
        """Ask the judge about pairs of outcomes; average the scores over the orders."""
        questions, orders = [], []
        for (i, j), name in zip(pairs, names, strict=True):
            place, swaps = f"tournament/{name}", (False, True)
            if self.orders == "random":
                swaps = (bool(torch.randint(2, (), generator=self.stream.generator(place))),)
            orders.append(swaps)
            for swapped in swaps:
                shown = (outcomes[j], outcomes[i]) if swapped else (outcomes[i], outcomes[j])
                first, second = (answer_of(outcome, self.tag) for outcome in shown)
                words = judge_words(self.stream, prompts[i], shown, self.reference)
                words |= {"low": f"{self.scale[0]:g}", "high": f"{self.scale[1]:g}"}
                text = self.question({**words, "first": first, "second": second})
                questions.append(judge_prompt(f"{place}/{swapped}", prompts[i], shown, text))
        low, high = self.scale
        wanted = f"two numbers from {low:g} to {high:g}"
        judged = iter(self.asker.ask(questions, "scores", wanted, self._read))
        return [
            _over_orders([turned(next(judged)) if swapped else next(judged) for swapped in swaps])
            for swaps in orders
        ]

    def _read(self, written: str) -> Scores | None:
        low, high = self.scale
        if not (match := SCORES.fullmatch(written)):
            return None
        first, second = ((float(value) - low) / (high - low) for value in match.groups())
        return (first, second) if 0 <= first <= 1 and 0 <= second <= 1 else None


def distinct_answers(outcomes: Sequence[Outcome], members: Sequence[int], tag: str) -> list[list[int]]:
    """Group the non-empty answers of `members` by equal text, in the order of first occurrence."""
    same: dict[object, list[int]] = {}
    for i in members:
        if not is_empty(outcomes[i], tag):
            # Images and videos are never taken as equal.
            key = i if media_of(outcomes[i]) else answer_of(outcomes[i], tag)
            same.setdefault(key, []).append(i)
    return list(same.values())


def turned(scores: Scores | Unread) -> Scores | Unread:
    """Swap the scores of two answers."""
    return scores if isinstance(scores, Unread) else (scores[1], scores[0])


def _over_orders(scores: Sequence[Scores | Unread]) -> Scores | Unread:
    """Average the scores of a pair over the readable orders."""
    read = [pair for pair in scores if not isinstance(pair, Unread)]
    if not read:
        return scores[0]
    if len(read) == 2:
        signs = [(a > b) - (a < b) for a, b in read]
        log_metric("tournament/consistency", float(signs[0] == signs[1]))
    return fmean(a for a, _ in read), fmean(b for _, b in read)


# ---- tournaments


def run_tournaments(
    tournaments: Sequence[Matches],
    compare: Callable[[Sequence[tuple[int, Pair]]], Sequence[Scores | Unread]],
) -> tuple[list[list[float]], list[Mapping[int, Unread]]]:
    """Run tournaments side by side, and compare the matches of a round of all of them together.

    Returns:
        The standings of the players of every tournament, and the unreadable judgement of each player without
        any readable match.
    """
    standings: list[list[float]] = [[] for _ in tournaments]
    readable: list[set[int]] = [set() for _ in tournaments]
    unread: list[dict[int, Unread]] = [{} for _ in tournaments]
    compared: dict[tuple[int, Pair], Scores | Unread] = {}  # a pair that meets again is not compared again
    waiting: dict[int, list[Pair]] = {}

    def go_on(number: int, scores: list[Scores] | None) -> None:
        try:
            # None starts a generator.
            waiting[number] = tournaments[number].send(scores)  # pyright: ignore[reportArgumentType]
        except StopIteration as finished:
            waiting.pop(number, None)
            standings[number] = finished.value

    for number in range(len(tournaments)):
        go_on(number, None)
    while waiting:
        matches = dict.fromkeys((number, pair) for number, pairs in waiting.items() for pair in pairs)
        new = [match for match in matches if match not in compared]
        for (number, (i, j)), scores in zip(new, compare(new) if new else (), strict=True):
            compared[number, (i, j)], compared[number, (j, i)] = scores, turned(scores)
            if isinstance(scores, Unread):
                unread[number] |= {i: scores, j: scores}
            else:
                readable[number] |= {i, j}
        for number, pairs in list(waiting.items()):
            results = [compared[number, pair] for pair in pairs]
            go_on(number, [(0.5, 0.5) if isinstance(scores, Unread) else scores for scores in results])
    faults: list[Mapping[int, Unread]] = [
        {player: fault for player, fault in faulty.items() if player not in played}
        for faulty, played in zip(unread, readable, strict=True)
    ]
    return standings, faults


def anchor(count: int) -> Matches:
    """Compare all players with the first, whose standing is the mean of its scores."""
    scores = yield [(0, player) for player in range(1, count)]
    return _anchored(scores)


def _anchored(scores: Sequence[Scores]) -> list[float]:
    return [fmean(first for first, _ in scores) if scores else 0.0, *(other for _, other in scores)]


def single_elimination(count: int) -> Matches:
    """Seed a bracket by comparisons with the first player; each loser is out.

    The losers of a round rank below the losers of later rounds, among themselves by the mean of all their
    scores. With an odd number of players the last one skips the round, and plays first in the next. A tie
    goes to the player that comes first in the bracket.
    """
    scores = yield [(0, player) for player in range(1, count)]
    history = [[first for first, _ in scores], *([other] for _, other in scores)]  # scores of every player
    seeding = _anchored(scores)
    seeds = sorted(range(count), key=lambda player: -seeding[player])
    alive, out = [seeds[place] for place in bracket(count)], []
    while len(alive) > 1:
        pairs = list(zip(alive[::2], alive[1::2], strict=False))
        winners, losers = [], []
        for (i, j), (first, second) in zip(pairs, (yield pairs), strict=True):
            history[i].append(first)
            history[j].append(second)
            winner, loser = (i, j) if first >= second else (j, i)
            winners.append(winner)
            losers.append(loser)
        alive = alive[2 * len(pairs) :] + winners
        out = sorted(losers, key=lambda player: -fmean(history[player])) + out
    order = alive + out
    return [float(count - order.index(player)) for player in range(count)]


def bracket(count: int) -> list[int]:
    """Order seeds, from 0, so that the best ones meet last: [0, 7, 3, 4, 1, 6, 2, 5] for 8."""
    places = [0] if count else []
    while len(places) < count:
        double = 2 * len(places)
        places = [place for seed in places for place in (seed, double - 1 - seed)]
    return [place for place in places if place < count]


def round_robin(count: int) -> Matches:
    """Compare all pairs; a win counts 1 point, a tie 1/2."""
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    points = [0.0] * count
    for (i, j), (first, second) in zip(pairs, (yield pairs), strict=True):
        points[i] += 0.5 + ((first > second) - (first < second)) / 2
        points[j] += 0.5 + ((second > first) - (second < first)) / 2
    return points


def from_ranks(points: Sequence[float]) -> list[float]:
    """Turn points into rewards by rank: (r_max - r) / (r_max - 1); 0 if all points are equal.

    The best has rank 1; equal points share the best of their ranks.
    """
    ranks = [1 + sum(other > own for other in points) for own in points]
    worst = max(ranks, default=1)
    return [(worst - rank) / (worst - 1) if worst > 1 else 0.0 for rank in ranks]


FORMS = {form.__name__: form for form in (anchor, single_elimination, round_robin)}
