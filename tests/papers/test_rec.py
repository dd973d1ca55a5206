"""REC: ranges of the ratio, and surplus negatives."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.objectives.surrogates import sequence_ratio, step_ratio
from mmrl.papers.rec import balanced_center, in_range
from tests.support.tables import assert_rows, loss_of, micro_batch, moved, reward_table, slope_of


@pytest.mark.parametrize(
    ("sides", "kept"),
    [
        ("one", [1, 0, 1, 1, 1, 0]),  # ratios 1, 1.3 and 0.2 of advantage 1, then of -1
        ("two", [1, 0, 0, 1, 0, 0]),
        ("ring", [1, 0, 1, 1, 0, 0]),  # 0.2 is beyond 1 - 0.6, and an advantage of 1 moves it back
    ],
)
def test_a_ratio_out_of_range_takes_a_step_out(sides, kept):
    gaps = [math.log(ratio) for ratio in (1.0, 1.3, 0.2)]
    new, batch = moved([gaps, gaps], [1.0, -1.0], [[-1.0] * 3, [-1.0] * 3])
    for weight in ("none", "ratio"):
        loss = loss_of(
            new,
            batch,
            surrogate={"name": "in_range", "sides": sides, "weight": weight},
            aggregation="step_mean",
        )
        slope = slope_of(loss, new).flatten() * 6  # the mean over six steps
        ratios = [1.0, 1.3, 0.2] if weight == "ratio" else [1.0] * 3
        signs = [-1.0] * 3 + [1.0] * 3
        wanted = [on * sign * ratio for on, sign, ratio in zip(kept, signs, ratios * 2, strict=True)]
        assert slope.tolist() == pytest.approx(wanted, abs=1e-6)


def test_rec_may_weigh_steps_by_their_advantage():
    # exp(1 / .5) = 7.389056 of advantage 1, exp(-1) = .367879 of -1/2; minus log-probabilities are 1
    new, batch = moved([[0.0], [0.0]], [1.0, -0.5])
    loss = in_range(step_ratio(new, batch), new, batch, weight="advantage", temperature=0.5)
    assert_rows(loss, [[7.389056], [-0.5 * 0.367879]])
    gaps = [math.log(ratio) for ratio in (1.0, 2.0)]  # an answer out of range as a whole: the mean is sqrt(2)
    new, batch = moved([gaps], [1.0])
    log_ratio = sequence_ratio(new, batch)
    assert not in_range(log_ratio, new, batch, weight="ratio").any()
    assert_rows(in_range(log_ratio, new, batch, weight="ratio", epsilon=0.5), [[2**0.5, 2**0.5]])


def test_one_side_with_ratios_has_the_gradient_of_the_clip():
    new, batch = micro_batch()
    slopes = [
        slope_of(loss_of(new, batch, surrogate=surrogate, aggregation="step_mean"), new)
        for surrogate in ({"name": "in_range", "weight": "ratio"}, "clip")
    ]
    torch.testing.assert_close(*slopes)


def test_surplus_negatives_are_left_out_at_random():
    table = reward_table([1, 0, 0, 0, 1, 1, 0, 1, 0, 0], group=[0] * 4 + [1] * 4 + [2] * 2)
    dropped = set()
    for seed in range(12):
        found = balanced_center(table, stream=Stream(seed)).values[:, 0, 0]
        # one positive keeps one of three negatives, with the mean 1/2; three keep their only one
        assert_rows(found[[0, *range(4, 10)]], [0.5, 0.25, 0.25, -0.75, 0.25, 0, 0])
        assert sorted(found[1:4].tolist()) == [-0.5, 0, 0]
        dropped.add(tuple(found[1:4].tolist()))
    assert len(dropped) == 3
    again = (balanced_center(table, stream=Stream(3)).values for _ in range(2))
    assert next(again).equal(next(again))
