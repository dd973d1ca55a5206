"""R2VPO: the variance of the ratio."""

from __future__ import annotations

import math

from mmrl.objectives.surrogates import step_ratio, unclipped
from mmrl.papers.r2vpo import ratio_variance
from tests.support.tables import assert_rows, loss_of, micro_batch, slope_of


def test_r2vpo_adds_the_squared_distance_of_the_ratio_to_one():
    # .04 (rho - 1)^2 beside -rho A: -.328206 by rows and -.480372 by steps; the mean square is .055528
    new, batch = micro_batch()
    rows = unclipped(step_ratio(new, batch), new, batch) + ratio_variance(new, batch)
    assert_rows(rows, [[-1.104728, -0.817416, -1.344963], [0.339508, 0.525741]])
    pieces_of = {"surrogate": "unclipped", "penalty": ["ratio_variance"]}
    assert_rows(loss_of(new, batch, **pieces_of, aggregation="sequence_mean")[None], [-0.328206])
    assert_rows(loss_of(new, batch, **pieces_of, aggregation="step_mean")[None], [-0.480372])
    assert_rows((ratio_variance(new, batch, coef=1.0).sum() / 5)[None], [0.055528])
    # 2 lambda rho (rho - 1)
    rho = math.exp(0.3)
    assert_rows(slope_of(ratio_variance(new, batch), new)[:1, 2:], [[0.08 * rho * (rho - 1)]])
