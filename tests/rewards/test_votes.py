"""Pseudo-labels by vote: worked numbers, ties, answers that cannot vote, parts of a group."""

from __future__ import annotations

from collections import Counter

import pytest

from mmrl.advantages.normalize import group_normalize
from mmrl.config.reward_adapters import SCORING, Scoring
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.votes import SubgroupMajority, choose_size, elect, majority
from tests.support.tables import assert_rows, reward_table


def group(*texts, uid="p", confidence=()):
    recorded = [{"confidence": value} for value in confidence] or [{}] * len(texts)
    outcomes = [Outcome(text=str(t), recorded=r) for t, r in zip(texts, recorded, strict=True)]
    return [Prompt(uid, ())] * len(texts), outcomes


def test_the_majority_answer_is_the_label():
    rewards = majority(*group(4, 6, 4, 9))
    assert rewards == [1, 0, 1, 0]
    a = 0.866024
    assert_rows(group_normalize(reward_table(rewards), eps=1e-6).values, [a, -a, a, -a])


def test_confidence_turns_the_vote():
    asked, made = group(7, 7, 3, 3, 3, 5, confidence=(14, 15, 9, 9, 9, 12))
    assert majority(asked, made, confidence="confidence") == [1, 1, 0, 0, 0, 0]
    assert majority(asked, made) == [0, 0, 1, 1, 1, 0]
    assert elect([("7", 29.0), ("3", 27.0), ("5", 12.0)]) == ("7", 29 / 68)


def test_the_first_of_a_tie_is_the_label_and_groups_vote_apart():
    assert majority(*group("b", "a", "a", "b")) == [1, 0, 0, 1]
    one, other = group("a", "a", "b"), group("b", "b", "a", uid="q")
    assert majority(one[0] + other[0], one[1] + other[1]) == [1, 1, 0, 1, 1, 0]


def test_an_empty_answer_does_not_vote():
    assert majority(*group("", "", "", "x")) == [0, 0, 0, 1]
    assert majority(*group("", " ", "<answer></answer>")) == [None] * 3
    assert majority(*group("two", "three", "it is 7", "= 7.0"), form="number") == [0, 0, 1, 1]


def test_what_is_equal_follows_form_and_tag():
    texts = "<answer>The Cat</answer>", "so <answer>cat.</answer>", "<answer>dog</answer>"
    assert majority(*group(*texts)) == [1, 0, 0]
    assert majority(*group(*texts), form="words") == [1, 1, 0]


def test_a_demonstration_has_no_confidence_and_no_vote():
    asked, made = group("a", "a", "b", confidence=(1, 1, 3))
    made[2] = Outcome(text="b")
    assert majority(asked, made, confidence="confidence") == [1, 1, 0]
    with pytest.raises(ValueError, match="weighted by 'certainty', but of no answer .*confidence is"):
        majority(asked, made, confidence="certainty")
    with pytest.raises(ValueError, match="'confidence' -1"):
        majority(*group("a", confidence=(-1,)), confidence="confidence")


def test_the_share_of_the_label_is_logged():
    call = Scoring()
    token = SCORING.set(call)
    majority(*group("a", "a", "b", ""))
    SCORING.reset(token)
    assert call.metrics == {"majority/share": [2 / 3]}


def test_the_size_of_parts_is_a_compromise():
    # distances .547723, .495311, (dominated), .836660
    assert choose_size([0.9, 0.7, 0.5, 0.4], [1, 2, 2, 4], 0.7) == 1
    assert choose_size([0.9, 0.7, 0.5, 0.4], [1, 2, 2, 4], 0.99) == 0
    assert choose_size([0.9, 0.7, 0.5, 0.4], [1, 2, 2, 4], 0.0) == 3
    assert choose_size([0.5, 0.5], [1, 1], 0.7) == 0


def test_parts_elect_their_labels_among_draws():
    texts = ["a"] * 9 + ["b"] * 7
    asked, made = group(*texts)
    found = SubgroupMajority(stream=Stream(1), quality=0.0)(asked, made)  # as many labels as there are
    assert {(text, value) for text, value in zip(texts, found, strict=True)} > {("a", 1.0), ("b", 1.0)}
    # Every answer drawn: all parts elect the label of the group, whatever their size.
    whole = SubgroupMajority(stream=Stream(1), share=1.0)(asked, made)
    assert whole == majority(asked, made)
    assert SubgroupMajority(stream=Stream(1))(asked, made) == SubgroupMajority(stream=Stream(1))(asked, made)
    assert SubgroupMajority(stream=Stream(1))(*group("", "")) == [None, None]


def test_parts_do_not_depend_on_other_groups():
    one, other = group(*"aabbabba"), group(*"ccdcddcd", uid="q")
    both = SubgroupMajority(stream=Stream(3))(other[0] + one[0], other[1] + one[1])
    assert both[8:] == SubgroupMajority(stream=Stream(3))(*one)


def test_labels_are_drawn_about_as_often_as_votes_say():
    votes = [("a", 1.0)] * 3 + [("b", 1.0)] * 3
    reward = SubgroupMajority(stream=Stream(0), share=1 / 6)
    drawn = Counter(reward._labels(f"p{i}", votes, 6)[0] for i in range(300))
    assert abs(drawn["a"] - 150) < 40
