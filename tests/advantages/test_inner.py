"""Advantage functions that read the model from inside: DCPO and CAPO, with their worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.inner import curvature, hot_mix
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
