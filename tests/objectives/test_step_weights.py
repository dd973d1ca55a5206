"""How much a counted step weighs: the four modes of truncated importance sampling."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.config.registry import find
from mmrl.core.types import Unit
from mmrl.objectives.surrogates import truncated_importance
from tests.support.tables import assert_rows, loss_of, objective_of, slope_of, step_table


def between(*ratios):
    """Build a batch whose probability is `ratios` times the engine's, per step of ragged rows."""
    engine = [[-5.0 - math.log(ratio) for ratio in row] for row in ratios]
    old = [[-5.0] * len(row) for row in ratios]
    return step_table(old, old=old, engine=engine, advantage=[1.0] * len(ratios))[1]


BATCH = between([0.5, 4.0, 2.0], [8.0, 0.25])  # products 4 and 2


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_truncate", [[0.5, 3, 2], [3, 0.25]]),
        ("token_mask", [[0.5, 0, 2], [0, 0.25]]),
        ("sequence_truncate", [[3, 3, 3], [2, 2]]),
        ("sequence_mask", [[0, 0, 0], [2, 2]]),
    ],
)
def test_the_ratio_is_cut_or_silenced_above_3(mode, wanted):
    assert_rows(truncated_importance(BATCH, mode=mode), wanted)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_truncate", [[0.5, 4, 2], [8, 0.4]]),
        ("token_mask", [[0.5, 4, 2], [8, 0]]),
        ("sequence_truncate", [[4, 4, 4], [2, 2]]),
        ("sequence_mask", [[4, 4, 4], [2, 2]]),
    ],
)
def test_the_lower_bound_alone(mode, wanted):
    assert_rows(truncated_importance(BATCH, mode=mode, clip_max=None, clip_min=0.4), wanted)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("clip_min", [None, 0.0])
def test_without_a_lower_bound_the_smallest_ratio_stays(mode, clip_min):
    # 1e-8 is above e^-20 = 2.06e-9, where log-ratios are held
    kept = truncated_importance(between([1e-8]), mode=mode, clip_min=clip_min)
    assert float(kept[0, 0]) == pytest.approx(1e-8, rel=1e-6)


def test_values_at_the_bounds_are_kept():
    # powers of two differ by one unit in the last place after log and exp, so the bounds are a hair wider
    batch = between([2.0, 0.5])
    kept = truncated_importance(batch, mode="token_mask", clip_max=2.0 + 1e-12, clip_min=0.5 - 1e-12)
    assert_rows(kept, [[2, 0.5]])


def test_equal_policies_are_kept_by_bounds_of_1():
    for mode in ("token_mask", "sequence_mask"):
        weights = truncated_importance(between([1.0, 1.0]), mode=mode, clip_max=1.0, clip_min=1.0)
        assert_rows(weights, [[1, 1]])


def test_log_ratios_are_held_within_20_of_0():
    batch = step_table([[0.0, 0.0]], old=[[0.0, 0.0]], engine=[[-50.0, 50.0]])[1]
    weights = truncated_importance(batch, clip_max=None)
    assert_rows(weights / math.exp(20.0), [[1, 0]])
    assert_rows(weights[:, 1:], [[math.exp(-20.0)]], tolerance=1e-14)


def test_steps_that_do_not_count_are_not_multiplied_into_the_row():
    batch = between([2.0, 1000.0])
    batch = batch.replace(mask=batch.mask * torch.tensor([[1.0, 0.0]]))
    assert_rows(truncated_importance(batch, mode="sequence_truncate")[:, :1], [[2]])


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate", "token_mask", "sequence_mask"])
def test_engines_that_agree_weigh_1_and_absurd_ones_stay_finite(mode):
    assert_rows(truncated_importance(between([1.0, 1.0]), mode=mode), [[1, 1]])
    absurd = between([math.exp(50), math.exp(-50)])
    assert truncated_importance(absurd, mode=mode, clip_max=None).isfinite().all()


def test_it_asks_for_both_policies_and_for_whole_rows():
    needs = find("step_weight", "truncated_importance").needs
    assert set(needs.others) == {"old", "engine"}
    assert needs.unit == Unit.ROW


def test_a_weight_of_2_counts_twice_in_loss_and_slope():
    rows = [[-1.0, -1.0]]
    new, batch = step_table(rows, advantage=[1.0], old=rows, engine=[[-1.0 - math.log(2.0)] * 2])
    plain = {"surrogate": "unclipped", "aggregation": "step_mean"}
    once, twice = (
        loss_of(new, batch, **plain, **step_weight)
        for step_weight in ({}, {"step_weight": "truncated_importance"})
    )
    assert_rows(twice[None], [2 * once.item()])
    assert_rows(slope_of(twice, new), (2 * slope_of(once, new)).tolist())


def test_step_weight_multiplies_after_the_division():
    _, batch = step_table([[-1.0], [-1.0]], old=[[-1.0]] * 2, engine=[[-1.0 - math.log(2.0)], [-1.0]])
    objective = objective_of(
        surrogate="unclipped", aggregation="sequence_mean", step_weight=["truncated_importance"]
    )
    assert_rows(objective.weigh(batch), [[1.0], [0.5]])
