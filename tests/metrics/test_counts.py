"""Ratios of sums, yes-or-no tables, and numbers made of numbers."""

from __future__ import annotations

import math

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.metrics import binary_classification, grouped_minimum, harmonic_mean, ratio_of_sums, weighted_sum
from tests.support.tables import reward_table

# Of the answers with both counts 3 of 6 mentions are wrong; a mean of ratios would be (1/2 + 2/4 + 0) / 3.
MENTIONS = reward_table({"wrong": [1, 2, 0, 7], "mentions": [2, 4, 0, None]})


def test_ratio_of_sums_is_no_mean_of_ratios():
    assert ratio_of_sums(MENTIONS, of="wrong", over="mentions") == {"wrong": 0.5}
    skewed = reward_table({"wrong": [1, 0], "mentions": [1, 3]})
    assert ratio_of_sums(skewed, of="wrong", over="mentions", label="CHAIRi") == {"CHAIRi": 0.25}


def test_ratio_of_sums_without_a_denominator_counts_answers():
    # (1 + 2 + 0 + 7) / 4
    assert ratio_of_sums(MENTIONS, of="wrong") == {"wrong": 2.5}


def test_ratio_of_sums_takes_the_complement_before_the_scale():
    skewed = reward_table({"wrong": [1, 0], "mentions": [1, 3]})
    given = ratio_of_sums(skewed, of="wrong", over="mentions", complement=True, scale=100, label="precision")
    assert given == {"precision": 75.0}


def test_ratio_of_sums_adds_what_a_script_begins_its_denominator_with():
    given = ratio_of_sums(MENTIONS, of="wrong", over="mentions", scale=100, offset=0.001)
    assert given["wrong"] == pytest.approx(300 / 6.001)


def test_a_ratio_over_nothing_is_0():
    nothing = reward_table({"wrong": [0, None], "mentions": [0, 3]})
    assert ratio_of_sums(nothing, of="wrong", over="mentions") == {"wrong": 0.0}


def test_counts_that_no_answer_has_are_no_numbers():
    apart = reward_table({"a": [1, None], "b": [None, 0]})
    assert math.isnan(ratio_of_sums(apart, of="a", over="b")["a"])
    assert all(math.isnan(value) for value in binary_classification(apart, answer="a", truth="b").values())


def yes_no(answers, truth):
    return reward_table({"answer": answers, "truth": truth})


def test_confusion_counts_yes_as_positive():
    # true yes 2, false yes 1, true no 1, missed yes 1: precision 2/3, recall 2/3
    table = yes_no([1, 1, 1, 0, 0], [1, 1, 0, 0, 1])
    found = binary_classification(table, answer="answer", truth="truth", share_name="yes_ratio")
    wanted = {"accuracy": 0.6, "precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "yes_ratio": 0.6}
    assert found == pytest.approx(wanted)


def test_confusion_with_no_as_positive_and_answers_that_are_neither():
    # of two true no one was answered; of two answered no one is true; the -1 is a wrong answer to a no
    table = yes_no([0, 0, -1, 1, None], [0, 1, 0, 1, 0])
    found = binary_classification(
        table, answer="answer", truth="truth", positive=0.0, scale=100, label="amber"
    )
    wanted = {"accuracy": 50.0, "precision": 50.0, "recall": 50.0, "f1": 50.0, "positive_ratio": 50.0}
    assert found == pytest.approx({f"amber/{name}": value for name, value in wanted.items()})


def test_confusion_rounds_before_f1_where_a_script_does():
    # precision 1/3 to 33.3, recall 1 to 100: 2 * .333 * 1 / 1.333 = 49.96, with a decimal 50.0
    table = yes_no([1, 1, 1], [1, 0, 0])
    exact = binary_classification(table, answer="answer", truth="truth", scale=100)
    rounded = binary_classification(table, answer="answer", truth="truth", scale=100, decimals=1)
    assert (exact["precision"], rounded["precision"]) == (pytest.approx(100 / 3), 33.3)
    assert (exact["f1"], rounded["f1"]) == (pytest.approx(50.0), 50.0)


def test_confusion_without_a_positive_is_0_and_no_crash():
    # AMBER with all answers Yes: nothing is answered No
    table = yes_no([1, 1], [0, 0])
    found = binary_classification(
        table, answer="answer", truth="truth", positive=0.0, offset=0.001, f1_offset=0.001
    )
    assert (found["precision"], found["recall"], found["f1"]) == (0.0, 0.0, 0.0)


def bound(**options):
    name = options.pop("name")
    return Pieces(Stream()).make("metric", Piece(name, options))


def test_combination_weighs_and_keeps_its_parts():
    table = reward_table({"a": [1, 0], "b": [1, 1]})
    metrics = (bound(name="mean", of="a"), bound(name="mean", of="b"))
    # 50 - .5 * 1/2 + 2 * 1
    found = weighted_sum(table, metric=metrics, weights={"a": -0.5, "b": 2.0}, constant=50.0, label="both")
    assert found == {"a": 0.5, "b": 1.0, "both": 51.75}
    with pytest.raises(ValueError, match=r"weighs \['c'\], but its metrics give \['a', 'b'\]"):
        weighted_sum(table, metric=metrics, weights={"c": 1.0}, label="both")


def test_harmonic_mean_is_f1_of_precision_and_recall():
    table = reward_table({"p": [1, 0], "r": [1, 1], "z": [0, 0]})
    metrics = tuple(bound(name="mean", of=name) for name in "prz")
    # 2 * .5 * 1 / 1.5
    found = harmonic_mean(table, metric=metrics, of=("p", "r"), label="f1")
    assert found["f1"] == pytest.approx(2 / 3)
    assert harmonic_mean(table, metric=metrics, of=("p", "z"), label="f1")["f1"] == 0.0
    with pytest.raises(ValueError, match="combines"):
        harmonic_mean(table, metric=metrics, of=("q",), label="f1")


def test_the_minimum_of_a_group_counts_once():
    # Groups: x 1 and 1, y 1 and 0, z 1 (the other does not apply), w none: (1 + 0 + 1) / 3.
    rewards, tags = [1, 1, 1, 0, None, 1, None], {"cluster": ["x", "y", "x", "y", "z", "z", "w"]}
    table = reward_table({"right": rewards}, tags=tags, group="abcdefg")
    assert grouped_minimum(table, of="right", label="circular") == {"circular": pytest.approx(2 / 3)}
    none = reward_table({"right": [None]}, tags={"cluster": ["x"]})
    assert math.isnan(grouped_minimum(none, of="right")["right"])
    with pytest.raises(ValueError, match="no outcome has the tag 'turn'"):
        grouped_minimum(table, of="right", by="turn")
