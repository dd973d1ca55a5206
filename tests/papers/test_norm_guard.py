"""NormGuard: velocities longer than the reference, by worked numbers."""

from __future__ import annotations

import math

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.papers.norm_guard import norm_hinge
from tests.objectives.test_fields import batch_of, said
from tests.support.tables import assert_rows


def test_norm_hinge_punishes_what_exceeds_a_multiple_of_the_reference():
    # root mean squares 5 / sqrt(2), 1 and 2 against 1: only what is above 1.5
    new = said(velocity=[[[3.0, 4.0], [1.0, 1.0], [2.0, 2.0]]])
    ones = [[[1.0, -1.0]] * 3]
    batch = batch_of(new, ref=said(velocity=ones))
    wanted = [[2 * (5 / math.sqrt(2) - 1.5), 0.0, 1.0]]
    assert_rows(norm_hinge(new, batch, coef=2.0, factor=1.5), wanted)


def test_norm_hinge_has_a_slope_at_zero_velocity():
    new = said(velocity=[[[0.0, 0.0]]])
    new.extra["velocity"].requires_grad_()
    norm_hinge(new, batch_of(new, ref=said(velocity=[[[0.0, 0.0]]]))).sum().backward()
    assert new.extra["velocity"].grad.isfinite().all()


def test_norm_hinge_asks_the_other_policy_for_its_velocity():
    for options, against in (({}, "ref"), ({"against": "ema"}, "ema")):
        needs = Pieces(Stream()).make("penalty", Piece("norm_hinge", options)).needs
        assert dict(needs.others) == {against: {"velocity"}} and "velocity" in needs.outputs


def test_the_coefficient_multiplies_and_equal_policies_cost_nothing():
    new, other = said(velocity=[[[1.0, 2.0], [0.0, 0.3]]]), said(velocity=[[[0.1, 0.1], [0.0, 0.1]]])
    batch = batch_of(new, ref=other, ema=new)
    assert_rows(norm_hinge(new, batch, coef=3.0), (3 * norm_hinge(new, batch, coef=1.0)).tolist())
    assert norm_hinge(new, batch).all() and not norm_hinge(new, batch, against="ema").any()
