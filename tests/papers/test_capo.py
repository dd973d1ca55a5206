"""CAPO: second-order terms of steps, worked out by hand, and the limit of their share."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.papers.capo import curvature
from tests.support.tables import reward_table


def capo(a, **options):
    """Two tokens: that of the worked numbers, p = [.7, .2, .1] with |h|^2 = 4, and one that is certain."""
    notes = {"old/logp": [[math.log(0.7), 0.0]], "old/hidden_sq_norm": [[4.0, 4.0]]}
    notes |= {"old/sum_p2": [[0.54, 1.0]], "old/sum_p3": [[0.352, 1.0]]}
    table = reward_table([a], length=[2], notes=notes)
    limits = {"max_fisher": 1.0, "max_hessian": 1.0, "learning_rate": 0.1, **options}
    return curvature(table, **limits).learn[0, 0].item()


@pytest.mark.parametrize(("a", "hessian"), [(1.0, 0.053856), (-1.0, 0.058144)])
def test_curvature_drops_steps_beyond_the_worked_numbers_of_capo(a, hessian):
    fisher = 0.001568
    assert capo(a)
    assert capo(a, max_fisher=fisher + 1e-6) and not capo(a, max_fisher=fisher - 1e-6)
    assert capo(a, max_hessian=hessian + 1e-6) and not capo(a, max_hessian=hessian - 1e-6)


def test_curvature_keeps_what_does_not_move_and_what_is_not_known():
    notes = {"old/logp": [[0.0, None, -9.0]], "old/hidden_sq_norm": [[1e6, None, 1e6]]}
    notes |= {"old/sum_p2": [[1.0, None, 0.5]], "old/sum_p3": [[1.0, None, 0.3]]}
    table = reward_table([1.0], length=[3], notes=notes)
    assert curvature(table).learn.tolist() == [[True, True, False]]
    assert curvature(table.put(0 * table.values)).learn.all()


def test_curvature_drops_the_furthest_steps_up_to_a_share():
    # Tokens of p = .05, .3, .6 and .9 among two, with the |h|^2 of a small model: lr |v|^2 |h|^2 with |v|^2 =
    # 2 (1 - p)^2 is .0812, .0441, .0144 and .0009. Three are beyond .01; of four steps half are two.
    p = torch.tensor([0.05, 0.3, 0.6, 0.9], dtype=torch.float64)
    p2, p3 = (p**k + (1 - p) ** k for k in (2, 3))
    notes = {"old/logp": [p.log().tolist()], "old/hidden_sq_norm": [[3000.0] * 4]}
    table = reward_table(
        [1.0], length=[4], notes=notes | {"old/sum_p2": [p2.tolist()], "old/sum_p3": [p3.tolist()]}
    )
    assert curvature(table).learn.tolist() == [[False, False, False, True]]
    assert curvature(table, max_share=0.5).learn.tolist() == [[False, False, True, True]]
    assert curvature(table, max_share=0.08).learn.all()
    assert curvature(table, max_share=0.5, max_fisher=1.0, max_hessian=0.05).learn[0].tolist() == [
        False, True, True, True,
    ]  # fmt: skip


def test_curvature_may_drop_steps_that_lower_the_objective():
    # a large step overshoots: lr .1 (A |v|)^2 |h|^2 - lr^2 / 2 A^3 |h|^4 (...) < 0 where lr is large
    assert capo(1.0, learning_rate=10.0, max_fisher=1e9, max_hessian=1e9)
    assert not capo(1.0, learning_rate=10.0, max_fisher=1e9, max_hessian=1e9, one_sided=True)
    assert capo(-1.0, learning_rate=10.0, max_fisher=1e9, max_hessian=1e9, one_sided=True)
