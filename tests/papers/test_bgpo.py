"""BGPO: the linear bound and its gradient."""

from __future__ import annotations

from mmrl.objectives.surrogates import step_ratio
from mmrl.papers.bgpo import linear_bound
from tests.support.tables import assert_rows, loss_of, moved


def losses(surrogate, new, batch, **options):
    return surrogate(step_ratio(new, batch), new, batch, **options)


def test_bgpo_is_linear_for_good_steps_and_exponential_for_bad_ones():
    # 1.1 and .8, halved; e^.05 and e^-.3
    new, batch = moved([[0.1, -0.2], [0.05, -0.3]], [1, -1])
    assert_rows(losses(linear_bound, new, batch) / 2, [[-0.55, -0.4], [0.525636, 0.370409]])
    loss = loss_of(new, batch, surrogate="linear_bound", aggregation="sequence_mean")
    assert_rows(loss[None], [-0.026978])


def test_bgpo_is_never_below_the_surrogate_of_the_mean_log_ratio():
    # -(e^-.05 - e^-.125) / 2; equal at the policy that sampled
    new, batch = moved([[0.1, -0.2], [0.05, -0.3]], [1, -1])
    pieces_of = {"ratio": "sequence_ratio", "surrogate": "unclipped", "aggregation": "sequence_mean"}
    exact = loss_of(new, batch, **pieces_of)
    assert_rows(exact[None], [-0.034366])
    assert loss_of(new, batch, surrogate="linear_bound", aggregation="sequence_mean") > exact
    new, batch = moved([[0.0, 0.0], [0.0, 0.0]], [1, -3])
    loss = loss_of(new, batch, surrogate="linear_bound", aggregation="sequence_mean")
    assert loss == loss_of(new, batch, **pieces_of)
