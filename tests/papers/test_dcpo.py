"""DCPO: the mixture, worked out by hand."""

from __future__ import annotations

import math

from mmrl.papers.dcpo import hot_mix
from tests.support.tables import assert_rows, reward_table


def dcpo(entropy, right=(1.0, 0.0), **notes):
    notes = {"old/logp": [[-1, -1], [-1, -1]], "old/logp_hot": [[-2, -2]] * 2, **notes}
    notes.setdefault("old/logp_cold", [[-1.1, -0.9], [-5, -5]])
    table = reward_table(
        {"right": right, "total": [1, -1]}, length=[2, 2], weights={"right": 0.0}, notes=notes
    )
    return hot_mix(table, of="right", entropy=entropy).values[:, 0]


def test_hot_mix_gives_the_worked_numbers_of_dcpo():
    # H 0.30 above 0.25: the colder policy; a = (.05 / .5) / (1 + .05 / .5) = .090909
    assert_rows(dcpo(0.30), [[0.991349, 1.009561], [-0.909091, -0.909091]])
    # H 0.1 below: the hotter one, exp(-1); the distance .15 counts as .1, so a = .2 / 1.2
    hot = 5 / 6 + math.exp(-1) / 6
    assert_rows(dcpo(0.1), [[hot, hot], [-5 / 6, -5 / 6]])


def test_hot_mix_changes_nothing_without_a_right_answer_or_a_past():
    assert_rows(dcpo(0.30, right=(0.0, 0.05)), [[1, 1], [-1, -1]])
    assert_rows(dcpo(0.0), [[1, 1], [-1, -1]])
    # an answer without the reward is not counted: f = 1, a = .05 / 1.05
    assert_rows(dcpo(0.30, right=(1.0, None))[1:], [[-1 / 1.05, -1 / 1.05]])
