"""SCOPE: labels of parts of a group."""

from __future__ import annotations

from collections import Counter

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.papers.scope import SubgroupMajority, choose_size
from mmrl.rewards.votes import majority


def group(*texts, uid="p", confidence=()):
    recorded = [{"confidence": value} for value in confidence] or [{}] * len(texts)
    outcomes = [Outcome(text=str(t), recorded=r) for t, r in zip(texts, recorded, strict=True)]
    return [Prompt(uid, ())] * len(texts), outcomes


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
