"""Pieces that read tokens, entropies and log-probabilities: SPO's mask, Clip-Cov, EGPO."""

from __future__ import annotations

import math

from mmrl.advantages.tokens import keep_steps
from tests.support.tables import assert_rows, reward_table


def test_keep_steps_keeps_a_range_of_steps_or_rows():
    table = reward_table([1, -1], length=[3, 2], notes={"entropy": [[0.1, 0.9, 0.2], [0.8, 0.8]]})
    assert_rows(keep_steps(table, at_most=0.7).values[:, 0], [[1, 0, 1], [0, 0]])
    assert_rows(keep_steps(table, at_least=0.2, at_most=0.85).values[:, 0], [[0, 0, 1], [-1, -1]])
    found = keep_steps(table, at_most=0.7, level="row")  # means .4 and .8
    assert_rows(found.values[:, 0], [[1, 1, 1], [0, 0]])
    assert found.learn[:, :2].all()
    dropped = keep_steps(table, at_most=0.7, level="row", drop=True)
    assert_rows(dropped.values[:, 0], [[1, 1, 1], [-1, -1]])
    assert dropped.learn[:, :2].tolist() == [[True, True], [False, False]]


def test_keep_steps_keeps_all_where_the_mean_is_outside():
    table = reward_table([1, -1], notes={"entropy": [[0.6], [0.9]]})
    assert_rows(keep_steps(table, at_most=0.7, if_mean_inside=True).values[:, 0], [[1], [-1]])
    assert_rows(keep_steps(table, at_most=0.8, if_mean_inside=True).values[:, 0], [[1], [0]])


def test_keep_steps_of_likely_tokens():
    logp = [[math.log(p) for p in (0.99, 0.5, 0.95, 0.6)]]
    table = reward_table([2], length=[4], notes={"logp": logp})
    assert_rows(keep_steps(table, of="logp", at_most=math.log(0.9)).values[:, 0], [[0, 2, 0, 2]])


def test_keep_steps_by_advantage_times_entropy():
    entropy = [[0.1, 1.2, 0.4, 0.9, 0.05, 0.3], [5.0]]
    table = reward_table([1.213557, 0], length=[6, 1], notes={"entropy": entropy})
    # keys .12 1.46 .49 1.09 .06 .36 and 0 for the row without an advantage
    found = keep_steps(table, of="weighted_entropy", top=3 / 7).values[0, 0].ne(0)
    assert found.tolist() == [False, True, True, True, False, False]


def test_keep_steps_leaves_what_was_not_noted():
    table = reward_table([1, 1], length=[2, 2], notes={"entropy": [[None, None], [9, 9]]})
    assert_rows(keep_steps(table, at_most=1.0).values[:, 0], [[1, 1], [0, 0]])
    assert_rows(keep_steps(table, at_most=1.0, level="row").values[:, 0], [[1, 1], [0, 0]])
