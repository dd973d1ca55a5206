"""How steps add up to a loss."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.registry import pieces
from mmrl.core.step_table import Totals
from mmrl.objectives.aggregations import fixed_length, group_mean, length_weighted, sequence_mean, step_mean
from tests.support.tables import assert_rows, loss_of, micro_batch, step_table

FIXED = {"name": "fixed_length", "max_completion_length": 4}
AGGREGATES = [sequence_mean, step_mean, length_weighted, fixed_length, group_mean]


def weights(aggregation, batch):
    return aggregation(batch, max_completion_length=4) if aggregation is fixed_length else aggregation(batch)


def test_every_aggregate_is_tested_here():
    trunk = {e.target for e in pieces("aggregation") if not e.target.__module__.startswith("mmrl.papers.")}
    assert trunk == set(AGGREGATES)


@pytest.mark.parametrize(
    ("aggregation", "plain", "higher"),
    [
        # steps -1.105171 -.818731 -1.2 | .4 .525636, with the third -1.28 under the higher clip
        ("sequence_mean", -0.289241, -0.302575),  # (-3.123902 / 3 + .925636 / 2) / 2
        ("step_mean", -0.439653, -0.455653),  # -2.198265 / 5
        (FIXED, -0.274783, -0.284783),  # -2.198265 / (2 rows * 4)
        ("length_weighted", -1.099133, -1.139133),  # -2.198265 / 2
    ],
)
def test_the_loss_of_the_shared_micro_batch(aggregation, plain, higher):
    new, batch = micro_batch()
    assert_rows(loss_of(new, batch, surrogate="clip", aggregation=aggregation)[None], [plain])
    clip = {"name": "clip", "epsilon_high": 0.28}
    assert_rows(loss_of(new, batch, surrogate=clip, aggregation=aggregation)[None], [higher])


def test_cispo_averages_over_steps():
    # (.552585 + .818731 + .24 - .670320 - .367945) / 5, and with .8 as lower bound -.8 in place of -.670320
    new, batch = micro_batch()
    cispo = {"name": "cispo", "clip_max": 1.2}
    assert_rows(loss_of(new, batch, surrogate=cispo, aggregation="step_mean")[None], [0.114610])
    both = {**cispo, "clip_min": 0.8}
    assert_rows(loss_of(new, batch, surrogate=both, aggregation="step_mean")[None], [0.088674])


def test_sapo_averages_over_steps_then_rows():
    # (-6.270632 / 3 + 1.767178 / 2) / 2
    new, batch = micro_batch()
    assert_rows(loss_of(new, batch, surrogate="sapo", aggregation="sequence_mean")[None], [-0.603311])


def test_a_row_of_one_step_weighs_as_much_as_a_longer_one():
    _, batch = step_table([[-1.0], [-1.0, -1.0]])
    assert_rows(sequence_mean(batch), [[1 / 2], [1 / 4, 1 / 4]])


def test_weights_are_0_on_padding_and_sum_to_1_where_they_average():
    _, batch = micro_batch()
    for aggregation in AGGREGATES:
        assert weights(aggregation, batch)[1, 2] == 0
    assert float(sequence_mean(batch).sum()) == pytest.approx(1)
    assert float(step_mean(batch).sum()) == pytest.approx(1)


def test_sequence_mean_is_step_mean_when_lengths_agree():
    _, batch = step_table([[-1.0, -1.0], [-1.0, -1.0]])
    assert sequence_mean(batch).equal(step_mean(batch))


def test_a_row_without_counted_steps_leaves_every_denominator():
    _, batch = step_table([[-1.0, -1.0], [-1.0, -1.0]], mask=[[1, 1], [0, 0]])
    for aggregation, wanted in zip(AGGREGATES, (1 / 2, 1 / 2, 1, 1 / 4, 1 / 2), strict=True):
        assert_rows(weights(aggregation, batch), [[wanted] * 2, [0, 0]])


def test_rows_that_were_drawn_may_stay_in_the_divisor():
    # TRL: the mean over both rows, one of which counts no step
    _, batch = step_table([[-1.0, -1.0], [-1.0, -1.0]], mask=[[1, 1], [0, 0]])
    for aggregation, wanted in ((sequence_mean, 1 / 4), (length_weighted, 1 / 2)):
        assert_rows(aggregation(batch, count="drawn"), [[wanted] * 2, [0, 0]])
    found = fixed_length(batch, max_completion_length=4, count="drawn")
    assert_rows(found, [[1 / 8] * 2, [0, 0]])


@pytest.mark.parametrize("aggregation", AGGREGATES)
def test_a_batch_without_counted_steps_weighs_nothing(aggregation):
    _, batch = step_table([[-1.0, -1.0]], mask=[[0, 0]])
    assert_rows(weights(aggregation, batch), [[0, 0]])


@pytest.mark.parametrize("aggregation", AGGREGATES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_mean_over_four_processes_is_the_loss_of_one(aggregation, rows):
    # Rows are dealt to four processes, so that some have none; totals are means over processes.
    _, whole = step_table([[-1.0], [-1.0, -1.0], [-1.0]][:rows])
    loss = torch.tensor([[3.0, 0.0], [5.0, 7.0], [2.0, 0.0]], dtype=torch.float64)[
        :rows, : whole.mask.shape[1]
    ]
    counts = whole.totals
    shared = Totals(counts.steps / 4, counts.rows / 4, counts.groups / 4)
    parts = [
        whole.select(torch.tensor(range(i, rows, 4), dtype=torch.int64)).replace(totals=shared)
        for i in range(4)
    ]
    dealt = sum((loss[i::4] * weights(aggregation, part)).sum() for i, part in enumerate(parts)) / 4
    torch.testing.assert_close(dealt, (loss * weights(aggregation, whole)).sum(), rtol=1e-12, atol=0)


def test_group_mean_adds_the_rows_of_a_group_up():
    # rows of 2, 1 and 2 steps; two groups
    _, batch = step_table([[-1.0, -1.0], [-1.0], [-1.0, -1.0]], group=[3, 3, 8])
    assert_rows(group_mean(batch), [[1 / 4] * 2, [1 / 2, 0], [1 / 4] * 2])
