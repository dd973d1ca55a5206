"""Divergences to a reference and the entropy bonus, with their slopes."""

from __future__ import annotations

import math

import pytest

from mmrl.config.registry import find
from mmrl.objectives.aggregations import group_mean
from mmrl.objectives.penalties import (
    distillation,
    entropy_bonus,
    k1,
    k2,
    k3,
    kl_abs,
    sft,
)
from tests.support.tables import assert_rows, slope_of, step_table

ESTIMATES = [k1, k2, k3, kl_abs]


def against_reference(*gaps):
    """Build a row whose log-ratios to `ref` are `gaps`."""
    return step_table([[-1.0] * len(gaps)], ref=[[-1.0 - gap for gap in gaps]])


@pytest.mark.parametrize(
    ("estimate", "values", "slopes"),
    [
        (k1, [0.3, -0.3], [1, 1]),
        (kl_abs, [0.3, 0.3], [1, -1]),
        # d^2 / 2, slope d
        (k2, [0.045, 0.045], [0.3, -0.3]),
        # e^-.3 + .3 - 1 = .040818 and e^.3 - .3 - 1 = .049859, slope 1 - e^-d
        (k3, [0.040818, 0.049859], [1 - math.exp(-0.3), 1 - math.exp(0.3)]),
    ],
)
def test_the_estimates_at_a_log_ratio_of_three_tenths(estimate, values, slopes):
    new, batch = against_reference(0.3, -0.3)
    loss = estimate(new, batch, coef=1.0)
    assert_rows(loss, [values])
    assert_rows(slope_of(loss, new), [slopes])


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_the_coefficient_multiplies_and_equal_policies_cost_nothing(estimate):
    new, batch = against_reference(0.3, 0.0)
    once, thrice = (estimate(new, batch, coef=coef) for coef in (1.0, 3.0))
    assert_rows(thrice, (3 * once).tolist())
    assert once[0, 1] == 0


def test_the_mean_of_k1_and_of_k3_over_all_tokens_is_the_divergence():
    policy, reference = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    new, batch = step_table([[math.log(p) for p in policy]], ref=[[math.log(q) for q in reference]])
    for estimate in (k1, k3):
        values = estimate(new, batch, coef=1.0)[0].tolist()
        assert abs(sum(p * v for p, v in zip(policy, values, strict=True)) - divergence) < 1e-12


def test_the_slope_of_k2_is_on_average_that_of_the_divergence():
    # By a logit the divergence changes by p_a (d_a - mean d); so does the mean slope of k2, and that of k1 by
    # 0.
    policy, reference = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    gaps = [math.log(p / q) for p, q in zip(policy, reference, strict=True)]
    new, batch = step_table([[math.log(p) for p in policy]], ref=[[math.log(q) for q in reference]])
    divergence = sum(p * d for p, d in zip(policy, gaps, strict=True))

    def by_logit(estimate, logit):
        """Average the slope over tokens: d log p_t / d logit = [t is it] - p."""
        slopes = slope_of(estimate(new, batch, coef=1.0), new)[0].tolist()
        return sum(
            p * slope * ((t == logit) - policy[logit])
            for t, (p, slope) in enumerate(zip(policy, slopes, strict=True))
        )

    for logit in range(3):
        assert abs(by_logit(k2, logit) - policy[logit] * (gaps[logit] - divergence)) < 1e-12
        assert abs(by_logit(k1, logit)) < 1e-12


def test_the_bias_correction_multiplies_k3_by_the_ratio_to_old():
    # ratio 2, k3 at .3 = .040818
    new, batch = step_table([[-1.0]], ref=[[-1.3]], old=[[-1.0 - math.log(2.0)]])
    loss = k3(new, batch, coef=1.0, use_bias_correction_kl=True)
    assert_rows(loss, [[2 * 0.040818]])
    # the ratio is differentiated too: rho * (k3 + 1 - e^-d)
    assert_rows(slope_of(loss, new), [[2 * (0.040818 + 1 - math.exp(-0.3))]], tolerance=4e-6)


def test_the_corrected_slope_is_that_of_the_divergence_on_policy():
    # at ratio 1: k3 + 1 - e^-d = d, which is k2's slope
    new, batch = against_reference(0.3, -0.7)
    loss = k3(new, batch, coef=1.0, use_bias_correction_kl=True)
    assert_rows(slope_of(loss, new), [[0.3, -0.7]])


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_against_names_another_policy_and_asks_for_it(estimate):
    new, batch = step_table([[-1.0]], ref=[[-1.0]], ema=[[-1.3]])
    assert estimate(new, batch, coef=1.0, against="ema").any()
    assert not estimate(new, batch, coef=1.0).any()


@pytest.mark.parametrize(
    ("estimate", "values", "slopes"),
    [
        (k1, [50.0, -50.0], [1, 1]),
        (kl_abs, [50.0, 50.0], [1, -1]),
        (k2, [1250.0, 1250.0], [50.0, -50.0]),
        # e^-50 + 49; and e^20 - 21, which no longer moves
        (k3, [49.0, math.exp(20.0) - 21], [1 - math.exp(-50.0), 0]),
    ],
)
def test_only_the_exponential_is_bounded_where_log_ratios_are_large(estimate, values, slopes):
    new, batch = step_table([[-1.0] * 3], mask=[[1, 1, 0]], ref=[[-51.0, 49.0, -300.0]])
    loss = estimate(new, batch, coef=1.0)
    assert_rows(loss, [[*values, 0]])
    assert_rows(slope_of(loss, new), [[*slopes, 0]])


def test_clip_max_bounds_k3_from_above_as_verl_does_at_10():
    # k3 at -3 is e^3 - 4 = 16.085537, at -2 e^2 - 3 = 4.389056, at 30 it is 29
    new, batch = against_reference(-3.0, -2.0, 30.0)
    assert_rows(k3(new, batch, coef=1.0), [[16.085537, 4.389056, 29.0]])
    loss = k3(new, batch, coef=2.0, clip_max=10.0)
    assert_rows(loss, [[20.0, 2 * 4.389056, 20.0]])
    assert_rows(slope_of(loss, new), [[0, 2 * (1 - math.exp(2.0)), 0]], tolerance=1e-5)


def test_the_ratio_of_the_bias_correction_is_at_most_e_to_the_20():
    # k3 at .3 is .040818; the log-ratios to `old` are 21, 20 and -30
    new, batch = step_table([[-1.0] * 3], ref=[[-1.3] * 3], old=[[-22.0, -21.0, 29.0]])
    loss = k3(new, batch, coef=1.0, use_bias_correction_kl=True)
    estimate = math.exp(-0.3) + 0.3 - 1
    wanted = [estimate * math.exp(20.0), estimate * math.exp(20.0), estimate * math.exp(-30.0)]
    assert_rows(loss, [wanted], tolerance=1e-6)


def test_negative_entropy_rewards_uncertainty():
    new, batch = step_table([[-1.0, -1.0]], extra={"entropy": [[2.0, 0.5]]})
    assert_rows(entropy_bonus(new, batch, coef=0.1), [[-0.2, -0.05]])
    assert find("penalty", "entropy_bonus").needs.outputs == {"entropy"}


# ---- imitation


def test_imitation_raises_the_best_row_of_every_group():
    new, batch = step_table(
        [[-1.0, -2.0], [-3.0], [-4.0], [-5.0]], advantage=[0.2, 0.9, 0.4, 0.3], group=[4, 4, 6, 6]
    )
    loss = sft(new, batch, coef=0.5)
    assert_rows(loss, [[0, 0], [1.5], [2.0], [0]])
    assert_rows(slope_of(loss, new), [[0, 0], [-0.5], [-0.5], [0]])


def test_imitation_compares_means_and_takes_the_first_of_equals():
    # a row of two steps is no better for being longer; of two best ones the first
    new, batch = step_table([[-1.0, -1.0], [-1.0], [-1.0]], advantage=[0.5, 0.8, 0.8])
    assert_rows(sft(new, batch, coef=1.0), [[0, 0], [1.0], [0]])


def test_imitation_knows_no_best_row_among_equals_nor_one_that_is_not_counted():
    new, batch = step_table([[-1.0]] * 2, advantage=[0.5, 0.5])
    assert not sft(new, batch).any()
    assert not sft(*step_table([[-1.0]], advantage=[0.5])).any()
    new, batch = step_table([[-1.0]] * 3, advantage=[0.5, 0.1, 9.0], mask=[[1], [1], [0]])
    assert_rows(sft(new, batch, coef=1.0), [[1.0], [0], [0]])
    # nor is it best where all others are below its 0
    new, batch = step_table([[-1.0]] * 3, advantage=[-0.5, -0.9, 0], mask=[[1], [1], [0]])
    assert_rows(sft(new, batch, coef=1.0), [[1.0], [0], [0]])


def test_sft_adds_the_error_of_the_best_image_up_as_gdro_does():
    # gamma d of the best of three, averaged over two draws and two groups: .5 * ((.2 + .4) / 2 + .3) / 2
    rows = [[-0.2, -0.4], [-1.0, -1.0], [-1.0, -1.0], [-0.3, -0.3], [-1.0, -1.0]]
    new, batch = step_table(rows, advantage=[3, 2, 1, 3, 2], group=[0, 0, 0, 1, 1])
    loss = (sft(new, batch, coef=0.5) * group_mean(batch)).sum()
    assert_rows(loss[None], [0.15])


def test_distillation_is_the_divergence_that_the_policy_says():
    new, batch = step_table([[-1.0, -2.0]], extra={"divergence": [[0.5, 0.25]]})
    assert_rows(distillation(new, batch, coef=2.0), [[1.0, 0.5]])
    assert find("penalty", "distillation").of_others == {"hidden"}


def fallen(*falls, advantage=0.0, mask=None):
    """Build rows whose log-probabilities fell by so much since they were sampled."""
    new = [[-1.0] * len(row) for row in falls]
    old = [[-1.0 + fall for fall in row] for row in falls]
    return step_table(new, advantage=[advantage] * len(falls), mask=mask, old=old)
