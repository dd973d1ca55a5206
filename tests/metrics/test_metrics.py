"""What a reward table says as a whole."""

from __future__ import annotations

import math

import pytest

from mmrl.metrics import mean, recall_at
from tests.support.tables import reward_table


def test_mean_averages_every_reward_over_the_answers_to_which_it_applies():
    table = reward_table({"iou": [1, None, 0.5], "label": [2, 3, 4]}, weights={"label": 0.0})
    assert mean(table) == {"iou": 0.75, "label": 3.0}


def test_mean_of_one_reward_under_another_name():
    table = reward_table({"iou": [1, 0], "format": [1, 1]})
    assert mean(table, of="iou", label="mIoU") == {"mIoU": 0.5}


def test_only_the_answer_of_a_row_is_measured():
    # rows end at place 1, 0 and 1
    assert mean(reward_table([[9, 1], [2], [9, 6]])) == {"reward": 3.0}


def test_recall_at_includes_the_bar():
    table = reward_table({"iou": [0.3, 0.5, 0.7, None, 0.2]})
    # of the four that apply: .3 .5 .7, .5 .7, .7
    wanted = {"R1@0.3": 0.75, "R1@0.5": 0.5, "R1@0.7": 0.25}
    assert recall_at(table, of="iou", at=(0.3, 0.5, 0.7), label="R1") == wanted
    assert recall_at(table, of="iou", at=(0.0,)) == {"iou@0": 1.0}


def test_a_strict_bar_must_be_exceeded():
    table = reward_table({"iou": [0.3, 0.5, 0.7, 0.2]})
    # above .3: .5 .7; above .5: .7; above .7: none
    wanted = {"R1@0.3": 0.5, "R1@0.5": 0.25, "R1@0.7": 0.0}
    assert recall_at(table, of="iou", at=(0.3, 0.5, 0.7), strict=True, label="R1") == wanted


def test_a_reward_that_applies_to_no_answer_is_not_a_number():
    table = reward_table({"iou": [None, None]})
    assert math.isnan(mean(table)["iou"])
    assert math.isnan(recall_at(table, of="iou", at=(0.5,))["iou@0.5"])


def test_an_unknown_reward_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="no reward is called 'iuo'; there are format, iou"):
        mean(reward_table({"iou": [1], "format": [1]}), of="iuo")
