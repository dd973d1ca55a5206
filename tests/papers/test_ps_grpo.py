"""Answers to several wordings of a question: the mean over other wordings, and its similarities."""

from __future__ import annotations

import math

import pytest

from mmrl.advantages.normalize import group_normalize
from mmrl.core.answers import word_f1
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.papers import ps_grpo as module
from mmrl.papers.ps_grpo import agreement, bleu, information_consistency, word_entropy
from tests.support.tables import assert_rows, reward_table


def asked(*pairs, uid="p"):
    prompts = [Prompt(uid, (Message("user", (Part(wording),)),)) for wording, _ in pairs]
    return prompts, [Outcome(text=text) for _, text in pairs]


FOUR = asked(("A?", "a1"), ("A?", "a2"), ("B?", "b1"), ("B?", "b2"))


def test_the_mean_is_over_the_answers_to_other_wordings(monkeypatch):
    given = {"a1 b1": 0.8, "a1 b2": 0.4, "a2 b1": 0.3, "a2 b2": 0.5}
    similar = lambda one, other: given[" ".join(sorted((one, other)))]
    monkeypatch.setattr(module, "SIMILARITIES", {"bleu": similar})
    rewards = agreement(*FOUR)
    assert rewards == pytest.approx([0.6, 0.4, 0.55, 0.45])
    advantages = group_normalize(reward_table(rewards), eps=1e-4).values
    assert_rows(advantages[:, 0, 0], [1.094246, -1.094246, 0.547123, -0.547123])


def test_without_another_wording_there_is_no_reward():
    assert agreement(*asked(("A?", "x"), ("A?", "x"))) == [None, None]
    one, other = asked(("A?", "x"), ("B?", "x")), asked(("B?", "y"), uid="q")
    assert agreement(one[0] + other[0], one[1] + other[1], similarity="equal") == [1, 1, None]


def test_blocks_are_compared_where_there_are_some():
    answers = asked(("A?", "<answer>A cat</answer>"), ("B?", "hm <answer>a  cat</answer>"), ("B?", ""))
    assert agreement(*answers, similarity="equal") == [0.5, 1, 0]


def test_bleu_by_hand():
    assert bleu("a b c d e", "a b c d e") == 1
    # 3 of 4 words, (1 + 1) of (3 + 1) pairs, (0 + 1) of (2 + 1) triples, (0 + 1) of (1 + 1) fours
    wanted = (3 / 4 * 2 / 4 * 1 / 3 * 1 / 2) ** (1 / 4)
    assert bleu("a b x c", "a b c d") == pytest.approx(wanted)
    # two words, both there: all precisions 1, brevity exp(1 - 4 / 2)
    assert bleu("a b", "a b c d") == pytest.approx(math.exp(-1))
    assert bleu("a a a a", "a b c d") == pytest.approx((1 / 4 * 1 / 4 * 1 / 3 * 1 / 2) ** (1 / 4))
    assert bleu("x", "a") == bleu("", "a") == bleu("a", "") == 0 and bleu("", "") == 1


def test_f1_by_hand():
    assert word_f1("The Eiffel Tower", "eiffel tower paris") == pytest.approx(0.8)
    assert word_f1("", "a cat") == 0


def test_information_and_stability_are_weighed(monkeypatch):
    # H = 2.0 and 1.6 with a gap of 2: F = .8; with 2.0 scaled to .6: .5 * .6 + .5 * .8
    numbers = {"a": 2.0, "b": 1.6}
    monkeypatch.setattr(module, "word_entropy", numbers.__getitem__)
    pair = asked(("A?", "a"), ("B?", "b"))
    assert information_consistency(*pair, max_gap=2.0) == pytest.approx([0.9, 0.4])
    numbers |= {"low": 1.4, "high": 2.4}
    more = asked(("A?", "a"), ("B?", "b"), ("A?", "low"), ("A?", "high"))
    assert information_consistency(*more, max_gap=2.0)[0] == pytest.approx(0.7)
    assert information_consistency(*pair) == pytest.approx([0.5, 0.0])


def test_equal_answers_are_stable():
    assert information_consistency(*asked(("A?", "x y"), ("B?", "x y"))) == [0.5, 0.5]
    assert information_consistency(*asked(("A?", "x y"))) == [None]
    assert word_entropy("a b a b") == pytest.approx(math.log(2)) and word_entropy("") == 0
