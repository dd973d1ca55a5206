"""Pseudo-labels by vote: worked numbers, ties and answers that cannot vote."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import group_normalize
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.votes import elect, majority
from mmrl.runtime.scoring import SCORING, Scoring
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
