"""Tournaments: brackets, standings and rewards by hand, and what a judge is asked."""

from __future__ import annotations

import pytest

from mmrl.config.loading import ConfigError
from mmrl.papers.arena_rl import (
    FORMS,
    Tournament,
    bracket,
    from_ranks,
    run_tournaments,
)
from mmrl.rewards.asking import Unread
from tests.rewards.test_judge import between, group, judging, logged


def played(form, strengths):
    """Play a tournament whose judge knows the strengths; return standings and all matches."""
    matches = []

    def compare(asked):
        matches.extend(pair for _, pair in asked)
        return [(strengths[i], strengths[j]) for _, (i, j) in asked]

    (standings,), (unread,) = run_tournaments([FORMS[form](len(strengths))], compare)
    assert not unread
    return standings, matches


def test_a_bracket_lets_the_best_meet_last():
    assert bracket(8) == [0, 7, 3, 4, 1, 6, 2, 5]
    assert bracket(5) == [0, 3, 4, 1, 2] and bracket(1) == [0] and bracket(0) == []


def test_single_elimination_by_hand():
    strengths = [3, 7, 5, 1, 6, 2, 4, 0]
    standings, matches = played("single_elimination", strengths)
    assert sorted(range(8), key=lambda i: -standings[i]) == [1, 4, 2, 6, 0, 5, 3, 7]
    wanted = [0.428571, 1, 0.714286, 0.142857, 0.857143, 0.285714, 0.571429, 0]
    rewards = from_ranks(standings)
    assert rewards == pytest.approx(wanted, abs=1e-6)
    # 7 of the seeding and 7 of the bracket, of which 0 against 6 was played before.
    assert len(matches) == 13 and len({frozenset(pair) for pair in matches}) == 13
    mean, square = sum(rewards) / 8, sum(r * r for r in rewards)
    deviation = ((square - 8 * mean**2) / 7) ** 0.5
    assert [(r - mean) / deviation for r in rewards] == pytest.approx(
        [-0.204124, 1.428869, 0.612372, -1.020620, 1.020620, -0.612372, 0.204124, -1.428869], abs=1e-5
    )


def test_who_is_free_plays_first_in_the_next_round():
    # The bracket is [8, 5, 3, 7, 6]: 8 beats 5, 7 beats 3, 6 is free; then 8 beats 6, and 7 in the end.
    strengths = [5, 7, 6, 8, 3]
    standings, _ = played("single_elimination", strengths)
    assert sorted(strengths, key=lambda s: -standings[strengths.index(s)]) == [8, 7, 6, 5, 3]


def test_double_elimination_by_hand():
    # Above: 1 beats 0 and 2 beats 3, then 1 beats 2. Below: 0 beats 3, which is out; 2 comes and beats 0. The
    # final is 1 against 2, which have met.
    standings, matches = played("double_elimination", [3, 7, 5, 1])
    assert matches == [(0, 1), (2, 3), (1, 2), (0, 3), (0, 2)]
    assert from_ranks(standings) == pytest.approx([1 / 3, 1, 2 / 3, 0])
    # Of five, 4 is free at first, and loses to 1 alone.
    standings, matches = played("double_elimination", [3, 7, 5, 1, 6])
    assert sorted(range(5), key=lambda i: -standings[i])[:2] == [1, 4]
    assert len({frozenset(pair) for pair in matches}) == len(matches) <= 8


@pytest.mark.parametrize("count", range(9))
def test_double_elimination_finds_the_two_best_wherever_they_stand(count):
    for turned in range(count):
        strengths = [(place + turned) * 5 % 9 for place in range(count)]
        standings, matches = played("double_elimination", strengths)
        assert sorted(standings) == [float(place) for place in range(1, count + 1)]
        best = sorted(range(count), key=lambda i: -strengths[i])[:2]
        assert sorted(range(count), key=lambda i: -standings[i])[:2] == best
        assert len(matches) <= max(0, 2 * (count - 1))


def test_scores_against_the_anchor_by_hand():
    assert from_ranks([5, 7, 6, 7, 3]) == [0.25, 1, 0.5, 1, 0]
    standings, matches = played("anchor", [5, 7, 6, 7, 3])
    assert standings == [5, 7, 6, 7, 3] and matches == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_round_robin_by_hand():
    assert from_ranks([2.5, 1.5, 2, 0]) == pytest.approx([1, 1 / 3, 2 / 3, 0])
    assert played("round_robin", [2, 2, 1])[0] == [1.5, 1.5, 0]


def test_swiss_never_repeats_a_match_and_ties_share():
    standings, matches = played("swiss", [3, 7, 5, 1, 6, 2, 4, 0])
    assert len(matches) == 12 and len({frozenset(pair) for pair in matches}) == 12
    assert max(range(8), key=lambda i: standings[i]) == 1 and min(range(8), key=lambda i: standings[i]) == 7
    # Round 1: 0-1 and 2-3, 4 rests. Round 2: 1-2 and 4-0, 3 rests. Round 3: 1-4 and 2-3 again, 0 rests.
    standings, matches = played("swiss", [1, 5, 4, 2, 3])
    assert matches[:4] == [(0, 1), (2, 3), (1, 2), (4, 0)] and matches[4:] == [(1, 4)]
    points = [standing // 36 for standing in standings]
    assert sum(points) == 3 * 3 and points[1] == 3  # a point for each match, and for each that rests
    assert from_ranks([4, 2, 2, 1], shared=True) == [1, 0.5, 0.5, 0]
    assert from_ranks([1.0]) == [0] and from_ranks([2, 2, 2], shared=True) == [0] * 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", range(1, 10))
def test_any_number_of_players_has_a_standing_for_each(form, count):
    strengths = [(i * 11 + 3) % 13 for i in range(count)]
    standings, _ = played(form, strengths)
    assert len(standings) == count
    assert standings[strengths.index(max(strengths))] == max(standings)


MARKS = {"a": 9, "b": 7, "c": 5, "d": 2}


def scores(text):
    first, second = (MARKS[answer] for answer in between(text))
    return f"Both are fine. <scores>{first} {second}</scores>"


def test_a_group_is_ranked_by_the_judge():
    reward, server = judging(scores, Tournament)
    found, metrics = logged(lambda: reward(*group("c", "a", "d", "b")))
    assert found == pytest.approx([1 / 3, 1, 0, 2 / 3])
    assert len(server.asked) == 10  # 5 matches in both orders: c and b met in the seeding
    assert metrics["tournament/consistency"] == [1] * 5
    reward, server = judging(scores, Tournament, orders="random", form="round_robin")
    assert reward(*group("c", "a", "d", "b")) == pytest.approx([1 / 3, 1, 0, 2 / 3])
    assert len(server.asked) == 6


def test_equal_answers_play_once_and_empty_ones_come_last():
    reward, server = judging(scores, Tournament)
    assert reward(*group("b", "a", "", "b")) == pytest.approx([2 / 3, 1, 0, 2 / 3])
    assert len(server.asked) == 2
    assert reward(*group("a", "a")) == [0, 0] and reward(*group("a")) == [None]
    assert reward(*group("", "a")) == [0, 1]


def test_groups_are_compared_side_by_side_and_alike_alone():
    reward, server = judging(scores, Tournament, orders="random")
    prompts, outcomes = group("c", "a", "d", "b")
    more = group("d", "b", "a", uid="q")
    both = reward(prompts + more[0], outcomes + more[1])
    asked = {prompt.uid for prompt in server.asked}
    server.asked.clear()
    assert both == reward(prompts, outcomes) + reward(*more)
    assert asked == {prompt.uid for prompt in server.asked}, "what is asked depends on other groups"


def test_a_comparison_that_cannot_be_read_is_a_tie_and_an_answer_without_any_a_fault():
    unreadable = lambda text: "no" if "d" in between(text) else scores(text)
    reward, _ = judging(unreadable, Tournament, form="round_robin", ask_again=0)
    found = reward(*group("a", "b", "d"))
    assert found[:2] == [1, 0.0]  # 1 + 1/2 points against 0 + 1/2 and 1
    assert isinstance(found[2], Unread) and "two numbers from 1 to 10" in repr(found[2])


@pytest.mark.parametrize("said", ["5", "0 5", "5 11", "five 6", ""])
def test_other_scores_are_not_read(said):
    reward, _ = judging(lambda text: f"<scores>{said}</scores>", Tournament, ask_again=0)
    assert all(isinstance(found, Unread) for found in reward(*group("a", "b")))


def test_a_scale_that_does_not_rise_is_refused():
    with pytest.raises(ConfigError, match="`scale` of a tournament must rise"):
        judging(scores, Tournament, scale=(2.0, 2.0))
