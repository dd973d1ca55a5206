"""Log-ratios per step and per row."""

from __future__ import annotations

import pytest
import torch

from mmrl.objectives.surrogates import sequence_ratio, sequence_sum, step_ratio
from tests.support.tables import assert_rows, micro_batch, moved, slope_of, step_table


def test_step_ratio_is_the_difference_of_log_probabilities():
    new, batch = micro_batch()
    assert_rows(step_ratio(new, batch), [[0.1, -0.2, 0.3], [-0.4, 0.05]])


def test_sequence_ratio_is_the_mean_over_the_steps_of_a_row():
    # (.1 - .2 + .3) / 3 and (-.4 + .05) / 2; their exponentials are GSPO's 1.068939 and .839457
    new, batch = micro_batch()
    log_ratio = sequence_ratio(new, batch)
    assert_rows(log_ratio, [[0.2 / 3] * 3, [-0.175] * 2])
    assert_rows(log_ratio.exp()[:, 0], [1.068939, 0.839457])


def test_sequence_sum_is_the_log_ratio_of_the_whole_row():
    # VESPO's and RLOO's W: e^.2 = 1.221403, e^-.35 = .704688
    new, batch = micro_batch()
    assert_rows(sequence_sum(new, batch).exp()[:, 0], [1.221403, 0.704688])


def test_padding_is_0_in_every_ratio():
    new, batch = micro_batch()
    for ratio in (step_ratio, sequence_ratio, sequence_sum):
        assert ratio(new, batch)[1, 2] == 0


def test_the_token_level_has_the_value_of_the_sequence_and_the_slope_of_the_step():
    new, batch = micro_batch()
    token = sequence_ratio(new, batch, level="token")
    assert_rows(token, sequence_ratio(new, batch).tolist(), tolerance=1e-12)
    assert_rows(slope_of(token[0, 1], new), [[0, 1, 0], [0, 0]])
    assert_rows(slope_of(sequence_ratio(new, batch)[0, 1], new), [[1 / 3] * 3, [0, 0]])


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_sequence_ratio_is_held_from_above_only(level):
    new, batch = moved([[50.0, 50.0], [-50.0, -50.0]], [1, 1])
    assert_rows(sequence_ratio(new, batch, level=level), [[10, 10], [-50, -50]])


def test_the_summed_ratio_is_held_on_both_sides():
    new, batch = moved([[50.0], [-50.0]], [1, 1])
    assert_rows(sequence_sum(new, batch), [[20], [-20]])


def test_all_three_agree_for_rows_of_one_step():
    new, batch = moved([[0.3], [-0.7]], [1, 1])
    for ratio in (sequence_ratio, sequence_sum):
        assert ratio(new, batch).equal(step_ratio(new, batch))


def test_a_row_without_counted_steps_is_0_and_finite():
    new, batch = step_table([[-1.0, -2.0]], mask=[[0.0, 0.0]], old=[[-9.0, -9.0]])
    for ratio in (step_ratio, sequence_ratio, sequence_sum):
        assert_rows(ratio(new, batch), [[0, 0]])


def test_only_counted_steps_enter_the_ratio_of_a_row():
    new, batch = step_table([[-1.0, -1.0]], mask=[[1.0, 0.0]], old=[[-1.5, -9.0]])
    assert_rows(sequence_ratio(new, batch)[:, 0], [0.5])
    assert_rows(sequence_sum(new, batch)[:, 0], [0.5])


def test_against_names_the_other_policy():
    new, batch = step_table([[-1.0]], old=[[-2.0]], engine=[[-4.0]])
    assert_rows(step_ratio(new, batch, against="engine"), [[3]])
    assert_rows(sequence_ratio(new, batch, against="engine"), [[3]])
    assert_rows(sequence_sum(new, batch, against="engine"), [[3]])


def test_old_that_nobody_asked_is_the_current_pass_with_slope_1():
    new, batch = step_table([[-1.0, -2.0]])
    log_ratio = step_ratio(new, batch)
    assert_rows(log_ratio, [[0, 0]])
    assert slope_of(log_ratio, new).equal(torch.ones(1, 2, dtype=torch.float64))
