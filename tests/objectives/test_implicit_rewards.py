"""What a step adds to the evidence for its row."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.config.registry import find, pieces
from mmrl.core.types import Unit
from mmrl.objectives.comparison import f_divergence, ld_log_ratio, log_ratio, logp, mean_log_ratio, mean_logp
from tests.support.tables import assert_rows, slope_of, step_table


def test_log_ratio_is_the_distance_to_the_reference_step_by_step():
    new, batch = step_table([[-1.0, -2.0], [-0.5]], ref=[[-1.5, -1.0], [-0.5]])
    assert_rows(log_ratio(new, batch), [[0.5, -1.0], [0.0]])
    assert_rows(slope_of(log_ratio(new, batch), new), [[1, 1], [1]])


def test_log_ratio_is_not_held_back():
    # a hinge or a sigmoid bounds the loss; the evidence itself has no bound
    new, batch = step_table([[-1.0]], ref=[[-51.0]])
    assert_rows(log_ratio(new, batch), [[50.0]])


def test_against_names_another_policy():
    new, batch = step_table([[-1.0]], ref=[[-1.0]], ema=[[-1.25]])
    assert_rows(log_ratio(new, batch, against="ema"), [[0.25]])


def test_mean_logp_adds_up_to_the_mean_of_the_row():
    # (-1 - 2 - 3) / 3 and -4 / 1; a step that is not counted does not count in the length
    new, batch = step_table([[-1.0, -2.0, -3.0], [-4.0, -9.0]], mask=[[1, 1, 1], [1, 0, 0]])
    implicit_reward = mean_logp(new, batch) * batch.mask
    assert_rows(implicit_reward.sum(-1), [-2.0, -4.0])
    assert_rows(slope_of(implicit_reward, new), [[1 / 3] * 3, [1, 0]])


@pytest.mark.parametrize("entry", pieces("implicit_reward"), ids=lambda entry: entry.full_name)
def test_a_row_without_counted_steps_gains_nothing(entry):
    new, batch = step_table([[-1.0], [-2.0]], mask=[[1], [0]], ref=[[-1.0], [-2.0]])
    implicit_reward = entry.target(new, batch) * batch.mask
    assert implicit_reward[1] == 0 and torch.isfinite(implicit_reward).all()


def test_means_are_over_rows_and_log_ratios_over_steps():
    assert find("implicit_reward", "log_ratio").needs.unit == Unit.STEP
    assert (
        find("implicit_reward", "mean_logp").needs.unit
        == find("implicit_reward", "mean_ratio").needs.unit
        == Unit.ROW
    )


def test_logp_is_the_log_probability_and_needs_no_reference():
    new, batch = step_table([[-1.0, -2.0], [-0.5]])
    assert_rows(logp(new, batch), [[-1.0, -2.0], [-0.5]])
    assert not find("implicit_reward", "logp").needs.others


def test_mean_log_ratio_adds_up_to_the_mean_of_the_row():
    # (.5 - 1) / 2 and 2 / 1
    new, batch = step_table([[-1.0, -2.0], [-0.5]], ref=[[-1.5, -1.0], [-2.5]])
    assert_rows((mean_log_ratio(new, batch) * batch.mask).sum(-1), [-0.25, 2.0])


def test_ld_log_ratio_counts_the_tail_of_the_longer_row_less():
    # two steps are shared in the first group; the second group has a row of one step
    logp = [[-1.0, -1.0, -1.0], [-2.0, -2.0], [-1.0, -1.0], [-1.0]]
    ref = [[-1.5, -1.25, -3.0], [-1.0, -1.0], [-2.0, -3.0], [-1.5]]
    new, batch = step_table(logp, group=[0, 0, 1, 1], ref=ref)
    gain = ld_log_ratio(new, batch, ld_alpha=0.25) * batch.mask
    assert_rows(gain, [[0.5, 0.25, 0.5], [-1, -1], [1, 0.5], [0.5]])
    assert_rows(slope_of(gain, new), [[1, 1, 0.25], [1, 1], [1, 0.25], [1]])
    assert_rows(ld_log_ratio(new, batch, ld_alpha=1.0) * batch.mask, log_ratio(new, batch).tolist())
    # what is outside of the mask is no length
    new, batch = step_table(logp, group=[0, 0, 1, 1], ref=ref, mask=[[0, 1, 1], [1, 1], [1, 1], [0]])
    assert_rows(ld_log_ratio(new, batch, ld_alpha=0.0) * batch.mask, [[0, 0.25, 2], [-1, -1], [1, 2], [0]])


@pytest.mark.parametrize(
    ("options", "wanted", "pull"),
    [
        # u = e^.75: 1 - 1 / u, log(2 u / (1 + u)), (u^-.5 - 1) / -.5, u - 1, and u f''(u)
        ({"divergence": "forward_kl"}, 1 - math.exp(-0.75), math.exp(-0.75)),
        ({"divergence": "js"}, math.log(2 / (1 + math.exp(-0.75))), 1 / (1 + math.exp(0.75))),
        ({"divergence": "alpha"}, 2 * (1 - math.exp(-0.375)), math.exp(-0.375)),
        ({"divergence": "alpha", "alpha": 2.0}, math.exp(0.75) - 1, math.exp(0.75)),
        ({"divergence": "alpha", "alpha": 1.0}, 0.75, 1.0),
    ],
)
def test_f_divergences_are_of_the_ratio_of_the_row(options, wanted, pull):
    new, batch = step_table([[-1.0, -2.0]], ref=[[-1.5, -2.25]])
    gain = f_divergence(new, batch, **options)
    assert_rows(gain, [[wanted / 2, wanted / 2]])
    assert_rows(slope_of(gain, new), [[pull, pull]])


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_f_divergences_of_rows_far_away_are_finite(divergence):
    new, batch = step_table([[0.0], [0.0]], ref=[[-50.0], [50.0]])
    gain = f_divergence(new, batch, divergence=divergence)
    assert gain.isfinite().all() and slope_of(gain, new).isfinite().all()
