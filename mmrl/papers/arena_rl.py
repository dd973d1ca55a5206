"""ArenaRL (arXiv 2601.06487): a judge compares few pairs of a group, and an answer earns by its rank.

Title: ArenaRL: Scaling RL for Open-Ended Agents via Tournament-based Relative Ranking
Formula: reward = (r_max - r) / (r_max - 1), with the rank r from 1 after a seeded bracket.
Our reading: equal answers share a rank, empty ones come last, unread comparisons are ties, both orders are
averaged.
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
# A tournament asks for matches, round by round, gets their scores, and returns a standing of every player:
# the larger, the better.
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
    """Reward an answer with its rank in a tournament of its group that a judge decides (ArenaRL).

    arXiv 2601.06487. The best answer of a group has 1, the worst 0, others (r_max - r) / (r_max - 1) with the
    rank r from 1. The eliminations cost up to 2 (G - 1) comparisons of G answers, `round_robin`
    G (G - 1) / 2; each is 2 questions with `orders: both`, whose scores are averaged (ours: the paper asks
    once). Our readings: equal answers play as one and share their rank, empty ones come last without playing;
    a comparison that cannot be read counts as a tie, and an answer of which none could be read is a fault, as
    for `judge`. An answer without others has no reward (the paper divides by zero). It logs `judge/unread`
    and `tournament/consistency`, the share of comparisons in which both orders prefer the same answer.

    Args:
        engine: As for `judge`.
        policy: As for `judge`.
        form: `anchor` compares all with the first answer; `single_elimination` seeds a bracket by that;
            `double_elimination` puts an answer out at its second loss; `swiss` pairs answers of like points,
            in log2(G) rounds; `round_robin` compares all.
        scale: The lowest and the highest score; numbers outside are not read.
        orders: Ask about a pair in `both` orders, or in one that is drawn at `random`.
        tag: As for `judge`.
        reference: Show the target where there is one.
        template: As for `judge`; it reads `first` and `second` in place of `answer`, and asks for <scores>.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    form: Literal["anchor", "single_elimination", "double_elimination", "swiss", "round_robin"] = (
        "single_elimination"
    )
    scale: tuple[float, float] = (1.0, 10.0)
    orders: Literal["both", "random"] = "both"
    template: str = ""

    def __post_init__(self) -> None:
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"`scale` of a tournament must rise, not be {list(self.scale)}")
        known = {"question", "first", "second", "reference", "columns", "low", "high", "mark", "made"}
        source, needed = self.template or TOURNAMENT, {"first", "second"}
        self.question = judge_template(source, known, needed, "scores", "tournament")
        self.asker = self.make_asker()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread | None]:
        """Compute the reward of every outcome; None without another answer."""
        rewards: list[float | Unread | None] = [None] * len(outcomes)
        groups = [members for members in comparable_outcomes(prompts) if len(members) > 1]
        players = [distinct_answers(outcomes, members, self.tag) for members in groups]
        tournaments = [FORMS[self.form](len(listed)) for listed in players]
        # Draws must not depend on which groups this process has; a prompt has a group for each place.
        met, labels = Counter[str](), list[str]()
        for members in groups:
            uid = prompts[members[0]].uid
            labels.append(f"{uid}/place-{met[uid]}" if met[uid] else uid)
            met[uid] += 1

        def compare(asked: Sequence[tuple[int, Pair]]) -> list[Scores | Unread]:
            """Compare pairs of the players of tournaments, by their numbers."""
            rows = [(players[t][i][0], players[t][j][0]) for t, (i, j) in asked]
            names = [f"{labels[t]}/{i}/{j}" for t, (i, j) in asked]
            return self._compare(prompts, outcomes, rows, names)

        standings, unread = run_tournaments(tournaments, compare)
        for number, (members, listed) in enumerate(zip(groups, players, strict=True)):
            points = {i: -math.inf for i in members}  # empty answers come last
            for player, rows in enumerate(listed):
                points |= {i: standings[number][player] for i in rows}
            values = from_ranks([points[i] for i in members], shared=self.form == "swiss")
            for i, value in zip(members, values, strict=True):
                rewards[i] = value
            for player, fault in unread[number].items():
                for i in listed[player]:
                    rewards[i] = fault
        return rewards

    def _compare(
        self,
        prompts: Sequence[Prompt],
        outcomes: Sequence[Outcome],
        pairs: Sequence[Pair],
        names: Sequence[str],
    ) -> list[Scores | Unread]:
        """Ask for the scores of pairs of outcomes; the mean over the orders."""
        questions, asked = [], []
        for (i, j), name in zip(pairs, names, strict=True):
            place, swaps = f"tournament/{name}", (False, True)
            if self.orders == "random":
                swaps = (bool(torch.randint(2, (), generator=self.stream.generator(place))),)
            asked.append(swaps)
            for swapped in swaps:
                shown = (outcomes[j], outcomes[i]) if swapped else (outcomes[i], outcomes[j])
                first, second = (answer_of(outcome, self.tag) for outcome in shown)
                words = judge_words(self.stream, prompts[i], shown, self.reference)
                words |= {"low": f"{self.scale[0]:g}", "high": f"{self.scale[1]:g}"}
                text = self.question({**words, "first": first, "second": second})
                questions.append(judge_prompt(f"{place}/{swapped}", prompts[i], shown, text))
        low, high = self.scale
        judged = iter(
            self.asker.ask(questions, "scores", f"two numbers from {low:g} to {high:g}", self._read)
        )
        return [
            _over_orders([turned(next(judged)) if swapped else next(judged) for swapped in swaps])
            for swaps in asked
        ]

    def _read(self, written: str) -> Scores | None:
        low, high = self.scale
        if not (found := SCORES.fullmatch(written)):
            return None
        first, second = ((float(value) - low) / (high - low) for value in found.groups())
        return (first, second) if 0 <= first <= 1 and 0 <= second <= 1 else None


def distinct_answers(outcomes: Sequence[Outcome], members: Sequence[int], tag: str) -> list[list[int]]:
    """List the answers of a group that are not empty; equal texts together, in the order of the first."""
    found: dict[object, list[int]] = {}
    for i in members:
        if not is_empty(outcomes[i], tag):
            # Images and videos are never taken as equal.
            key = i if media_of(outcomes[i]) else answer_of(outcomes[i], tag)
            found.setdefault(key, []).append(i)
    return list(found.values())


def turned(scores: Scores | Unread) -> Scores | Unread:
    """Exchange the scores of two answers."""
    return scores if isinstance(scores, Unread) else (scores[1], scores[0])


def _over_orders(scores: Sequence[Scores | Unread]) -> Scores | Unread:
    """Average the scores of a pair over the orders that could be read."""
    read = [found for found in scores if not isinstance(found, Unread)]
    if not read:
        return scores[0]
    if len(read) == 2:
        signs = [(a > b) - (a < b) for a, b in read]
        log_metric("tournament/consistency", float(signs[0] == signs[1]))
    return fmean(a for a, _ in read), fmean(b for _, b in read)


# ---- tournaments: which pairs are compared, and what follows from their scores


def run_tournaments(
    tournaments: Sequence[Matches],
    compare: Callable[[Sequence[tuple[int, Pair]]], Sequence[Scores | Unread]],
) -> tuple[list[list[float]], list[Mapping[int, Unread]]]:
    """Run tournaments side by side, so that the matches of a round of all of them are compared together.

    Returns:
        The standings of the players of every tournament, and by player the judgement that stands for one of
        whose matches none could be read.
    """
    standings: list[list[float]] = [[] for _ in tournaments]
    read: list[set[int]] = [set() for _ in tournaments]
    unread: list[dict[int, Unread]] = [{} for _ in tournaments]
    known: dict[tuple[int, Pair], Scores | Unread] = {}  # two that meet again are not compared again
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
        listed = [(number, pair) for number, pairs in waiting.items() for pair in pairs]
        asked = [both for both in dict.fromkeys(listed) if both not in known]
        for (number, (i, j)), scores in zip(asked, compare(asked) if asked else (), strict=True):
            known[number, (i, j)], known[number, (j, i)] = scores, turned(scores)
            if isinstance(scores, Unread):
                unread[number] |= {i: scores, j: scores}
            else:
                read[number] |= {i, j}
        for number, pairs in list(waiting.items()):
            met = [known[number, pair] for pair in pairs]
            go_on(number, [(0.5, 0.5) if isinstance(scores, Unread) else scores for scores in met])
    faults: list[Mapping[int, Unread]] = [
        {player: fault for player, fault in found.items() if player not in played}
        for found, played in zip(unread, read, strict=True)
    ]
    return standings, faults


def anchor(count: int) -> Matches:
    """Compare all players with the first; one stands by its score, the first one by the mean of its own."""
    scores = yield [(0, player) for player in range(1, count)]
    return _anchored(scores)


def _anchored(scores: Sequence[Scores]) -> list[float]:
    return [fmean(first for first, _ in scores) if scores else 0.0, *(other for _, other in scores)]


def single_elimination(count: int) -> Matches:
    """Seed a bracket by comparisons with the first player; who loses is out.

    The losers of a round stand below those of later rounds, by the mean of all their scores. Of an odd number
    the last one goes on without playing and stands first in the next round, where it plays; a tie is won by
    the player that comes first in the bracket.
    """
    scores = yield [(0, player) for player in range(1, count)]
    met = [[first for first, _ in scores], *([other] for _, other in scores)]  # scores of every player
    seeding = _anchored(scores)
    seeds = sorted(range(count), key=lambda player: -seeding[player])
    alive, order = [seeds[place] for place in bracket(count)], []
    while len(alive) > 1:
        won, free, lost = yield from _round(alive, met)
        alive, order = free + won, _by_mean(lost, met) + order
    order = alive + order
    return [float(count - order.index(player)) for player in range(count)]


def double_elimination(count: int) -> Matches:
    """Let who loses play on below, where the next loss is the last; the two winners meet in the end.

    Pairs are neighbours in the order of the answers, which says nothing of them (the code draws pairs). Those
    who are out stand by the round below in which they lost, then by the mean of all their scores.
    """
    met: list[list[float]] = [[] for _ in range(count)]
    above, dropped = list(range(count)), []
    while len(above) > 1:
        won, free, lost = yield from _round(above, met)
        above = free + won  # who was free is not so again
        dropped.append(lost)
    below, order = [], []
    while dropped or len(below) > 1:
        won, free, lost = yield from _round(below + (dropped.pop(0) if dropped else []), met)
        below, order = free + won, _by_mean(lost, met) + order
    if below:
        won, _, lost = yield from _round(above + below, met)
        above = won + lost
    order = above + order
    return [float(count - order.index(player)) for player in range(count)]


def _round(
    players: list[int], met: list[list[float]]
) -> Generator[list[Pair], list[Scores], tuple[list[int], list[int], list[int]]]:
    """Play neighbours, and note the scores; returns who won, who had nobody to play with, and who lost."""
    pairs = list(zip(players[::2], players[1::2], strict=False))
    won, lost = [], []
    for (i, j), (first, second) in zip(pairs, (yield pairs) if pairs else (), strict=True):
        met[i].append(first)
        met[j].append(second)
        winner, loser = (i, j) if first >= second else (j, i)
        won.append(winner)
        lost.append(loser)
    return won, players[2 * len(pairs) :], lost


def _by_mean(players: list[int], met: list[list[float]]) -> list[int]:
    return sorted(players, key=lambda player: -fmean(met[player]))


def bracket(count: int) -> list[int]:
    """Order seeds, from 0, so that the best ones meet last: [0, 7, 3, 4, 1, 6, 2, 5] for 8."""
    places = [0] if count else []
    while len(places) < count:
        double = 2 * len(places)
        places = [place for seed in places for place in (seed, double - 1 - seed)]
    return [place for place in places if place < count]


def round_robin(count: int) -> Matches:
    """Compare all pairs; a player stands by its points: 1 for a win, 1/2 for a tie."""
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    points = [0.0] * count
    for (i, j), scores in zip(pairs, (yield pairs), strict=True):
        win = _win(scores)
        points[i] += win
        points[j] += 1 - win
    return points


def swiss(count: int) -> Matches:
    """Pair players of like points that have not met, in ceil(log2 count) rounds (Swiss system).

    A player stands by its points, then by the sum of the points of those it met. The last one of an odd
    number gets a point without playing, each player once. Where all that are left have met, two meet again.
    """
    points, met = [0.0] * count, [set[int]() for _ in range(count)]
    rested: set[int] = set()
    for _ in range(min(count - 1, math.ceil(math.log2(count))) if count > 1 else 0):
        left = sorted(range(count), key=lambda player: -points[player])
        if len(left) % 2:
            free = next(player for player in reversed(left) if player not in rested)
            left.remove(free)
            rested.add(free)
            points[free] += 1.0
        pairs = []
        while left:
            i = left.pop(0)
            j = next((player for player in left if player not in met[i]), left[0])
            left.remove(j)
            pairs.append((i, j))
        for (i, j), scores in zip(pairs, (yield pairs), strict=True):
            win = _win(scores)
            points[i] += win
            points[j] += 1 - win
            met[i].add(j)
            met[j].add(i)
    # Points are multiples of 1/2, and their sums over at most `count` others stay below the factor.
    return [
        points[player] * (count + 1) ** 2 + sum(points[other] for other in met[player])
        for player in range(count)
    ]


def _win(scores: Scores) -> float:
    first, second = scores
    return 0.5 + ((first > second) - (first < second)) / 2


def from_ranks(points: Sequence[float], *, shared: bool = False) -> list[float]:
    """Turn points into rewards by rank: (r_max - r) / (r_max - 1), 0 where all are equal.

    The best has rank 1. Equal points have the smallest of their ranks, or with `shared` the mean reward of
    the places that they hold.
    """
    count = len(points)
    if len(set(points)) < 2:
        return [0.0] * count
    if shared:
        better = [sum(other > own for other in points) for own in points]
        equal = [sum(other == own for other in points) for own in points]
        return [1 - (b + (e - 1) / 2) / (count - 1) for b, e in zip(better, equal, strict=True)]
    ranks = [1 + sum(other > own for other in points) for own in points]
    worst = max(ranks)
    return [(worst - rank) / (worst - 1) for rank in ranks]


FORMS: Mapping[str, Callable[[int], Matches]] = {
    "anchor": anchor,
    "single_elimination": single_elimination,
    "double_elimination": double_elimination,
    "swiss": swiss,
    "round_robin": round_robin,
}
