"""MultiRole-R1: measures of varied wording, by hand."""

from __future__ import annotations

import math

import pytest

from mmrl.advantages.shape import total
from mmrl.core.types import Outcome, Prompt
from mmrl.papers.multirole_r1 import MEASURES, lexical_variety
from tests.support.tables import assert_rows, reward_table


def measure(reward, text, **options):
    return reward([Prompt("p", ())], [Outcome(text=text)], **options)[0]


# The cat sat. / The dog sat on it!
TEXT = "The cat sat. The dog sat on it!"


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("vocabulary", 6 / 8),
        ("entropy", (2 * 0.25 * math.log(4) + 4 * 0.125 * math.log(8)) / math.log(8)),
        ("sentence_length", 1 / (1 + 4)),
        ("sentence_form", 1.0),
        ("neighbours", 1 - 2 / 6),
        ("yule", 1 - (4 + 4 + 4 - 8) / 64),
        ("ngrams", 1.0),
        ("function_words", 3 / 4),
    ],
)
def test_each_measure_by_hand(name, wanted):
    assert measure(lexical_variety, TEXT, weights={name: 2.0}) == pytest.approx(wanted)


def test_the_measures_are_averaged_and_stay_between_0_and_1():
    alone = [measure(lexical_variety, TEXT, weights={name: 1.0}) for name in MEASURES]
    assert measure(lexical_variety, TEXT) == pytest.approx(sum(alone) / 8)
    for text in ("", "...", "word", "a a a a a. a a.", "x " * 999):
        assert 0 <= measure(lexical_variety, text) <= 1
    assert measure(lexical_variety, "") == 0


def test_a_wrong_answer_never_outscores_a_right_one():
    table = reward_table({"right": [1, 0], "variety": [0.4, 0.8]}, weights={"right": 0.9, "variety": 0.1})
    assert_rows(total(table).values[:, 0, 0], [0.94, 0.08])


def test_an_unknown_measure_is_named():
    with pytest.raises(ValueError, match="names \\['length'\\]; there are vocabulary, entropy"):
        measure(lexical_variety, TEXT, weights={"length": 1.0})
