"""Nemotron-Cascade: the mean over the steps of a group."""

from __future__ import annotations

from mmrl.papers.nemotron_cascade import group_step_mean
from tests.support.tables import assert_rows, step_table


def test_group_step_mean_weighs_the_steps_of_a_group_alike():
    # rows of 2, 1 and 2 steps; the first group has 3 steps, the second 2, and there are two groups
    _, batch = step_table([[-1.0, -1.0], [-1.0], [-1.0, -1.0]], group=[3, 3, 8])
    assert_rows(group_step_mean(batch), [[1 / 6] * 2, [1 / 6, 0], [1 / 4] * 2])
