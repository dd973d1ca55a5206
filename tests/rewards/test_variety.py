"""Repetition of n-grams, by hand."""

from __future__ import annotations

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.variety import repetition_penalty


def measure(reward, text, **options):
    return reward([Prompt("p", ())], [Outcome(text=text)], **options)[0]


def test_repeated_ngrams_cost_their_share():
    # 5 pairs, 2 of them distinct
    assert measure(repetition_penalty, "a b a b a b", ngram_size=2) == pytest.approx(-0.6)
    assert measure(repetition_penalty, "A b c a B c", max_penalty=-2.0) == pytest.approx(-0.5)
    assert measure(repetition_penalty, "a b") == measure(repetition_penalty, None) == 0
    assert measure(repetition_penalty, "a b c d") == 0
