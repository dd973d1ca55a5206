"""How much answers differ: numbers by hand."""

from __future__ import annotations

import math

import pytest

from mmrl.papers.mmr1_vas import (
    DIVERSITY,
    distinct_3,
    edit_distance,
    one_minus_self_bleu_123,
    self_bleu_123,
)


def test_distinct_counts_3_grams_inside_answers():
    # 123 234 | 123: three of which two are distinct; nothing spans two answers.
    assert distinct_3([[1, 2, 3, 4], [1, 2, 3]]) == pytest.approx(2 / 3)
    assert distinct_3([[1, 2], [3]]) == 0.0


def test_self_bleu_by_hand():
    # 3 of 4 tokens, 2 of 3 pairs (12, 23), 1 of 2 triples: (3/4 2/3 1/2)^(1/3) = (1/4)^(1/3).
    # The same the other way, and no brevity penalty.
    assert self_bleu_123([[1, 2, 3, 4], [1, 2, 3, 5]]) == pytest.approx(0.25 ** (1 / 3))
    assert one_minus_self_bleu_123([[1, 2, 3, 4], [1, 2, 3, 5]]) == pytest.approx(1 - 0.25 ** (1 / 3))


def test_self_bleu_smooths_and_penalises_brevity():
    # [1, 2] against [1, 3, 4]: 1 of 2 tokens, 0 of 1 pairs (0.1), no triple (0.1), and e^(1 - 3/2).
    short = math.exp(-0.5) * (0.5 * 0.1 * 0.1) ** (1 / 3)
    # [1, 3, 4] against [1, 2]: 1 of 3, 0 of 2 pairs (0.1 / 2), 0 of 1 triples; it is longer, so no penalty.
    long = (1 / 3 * 0.05 * 0.1) ** (1 / 3)
    assert self_bleu_123([[1, 2], [1, 3, 4]]) == pytest.approx((short + long) / 2)


def test_an_n_gram_counts_as_often_as_another_answer_has_it():
    # [1, 1, 1] against [1, 1]: 2 of 3 tokens, 1 of 2 pairs, 0 of 1 triples; the other way 2 of 2, 1 of 1, and
    # no triple; the shorter has the penalty e^(1 - 3/2).
    longer, shorter = (2 / 3 * 1 / 2 * 0.1) ** (1 / 3), math.exp(-0.5) * (1 * 1 * 0.1) ** (1 / 3)
    assert self_bleu_123([[1, 1, 1], [1, 1]]) == pytest.approx((longer + shorter) / 2)


def test_answers_that_are_alike_have_no_diversity_and_strangers_all_of_it():
    alike, strangers = [[1, 2, 3, 4]] * 3, [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert one_minus_self_bleu_123(alike) == pytest.approx(0.0) == edit_distance(alike)
    assert one_minus_self_bleu_123(strangers) == 1.0 == edit_distance(strangers)


@pytest.mark.parametrize("name", DIVERSITY)
def test_one_answer_and_empty_ones_are_no_error(name):
    # distinct_3 of one answer is about repetition inside it.
    assert DIVERSITY[name]([[1, 2, 3]]) == (1.0 if name == "distinct_3" else 0.0)
    assert 0.0 <= DIVERSITY[name]([[], []]) <= 1.0
    assert 0.0 <= DIVERSITY[name]([[], [1, 2, 3, 4]]) <= 1.0


def test_edit_distance_is_a_share_of_the_longer_answer():
    # 12 to 123: 1 of 3; 12 to 45: 2 of 2; 123 to 45: 3 of 3.
    assert edit_distance([[1, 2], [1, 2, 3], [4, 5]]) == pytest.approx((1 / 3 + 1 + 1) / 3)
