"""Comparisons of all rows of a group: AOT, and slopes of all."""

from __future__ import annotations

import pytest
import torch

from mmrl.objectives.compare import sigmoid
from mmrl.objectives.listwise import aot
from mmrl.papers.disco import discriminate
from mmrl.papers.dno import dno
from tests.objectives.test_compare import gained, shown, slope, softplus


def test_aot_of_a_pair_is_dpo():
    for rows in ([[0.7, -0.1], [0.2, 0.1]], [[-50.0], [50.0]]):
        shown(aot(*gained(rows, [1, -1])), sigmoid(*gained(rows, [1, -1])))
        smoothed = aot(*gained(rows, [1, -1]), label_smoothing=0.2)
        shown(smoothed, sigmoid(*gained(rows, [1, -1]), label_smoothing=0.2))


def test_aot_compares_sorted_rows():
    # 2 > 1 against 0 > -3: gaps 2 and 4, in any order of the rows
    rows, signs = [[1.0], [-3.0], [2.0], [0.0]], [1, -1, 2, -2]
    wanted = (softplus(-2.0) + softplus(-4.0)) / 2
    shown(aot(*gained(rows, signs), beta=1.0), wanted)
    shown(aot(*gained(rows[::-1], signs[::-1]), beta=1.0), wanted)


def test_aot_repeats_the_values_of_the_smaller_side():
    # one chosen row of 1 against -1, 0 and 2
    implicit_reward, batch = gained([[1.0], [-1.0], [0.0], [2.0]], [1, -1, -1, -1])
    shown(aot(implicit_reward, batch, beta=1.0), (softplus(-2.0) + softplus(-1.0) + softplus(1.0)) / 3)
    implicit_reward, batch = gained([[1.0], [0.0]], [1, 1])
    assert aot(implicit_reward, batch) == 0


@pytest.mark.parametrize("compare", [discriminate, dno, aot])
def test_gains_of_50_have_finite_slopes(compare):
    for far in ([50.0, -50.0, -50.0, 50.0], [-50.0, 50.0, 50.0, -50.0], [1e3, -1e3, 1e3, -1e3]):
        implicit_reward, batch = gained([[value] for value in far], [1, 0.5, -0.5, -1])
        loss = compare(implicit_reward, batch)
        assert torch.isfinite(loss) and slope(loss, implicit_reward).isfinite().all()
