"""Comparisons that read rows on their own, and the mixtures made of them."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.objectives.compare import sigmoid
from mmrl.objectives.labels import apo_down, apo_zero, bco_pair, exo_pair, kto, nca_pair, sppo_hard
from tests.objectives.test_compare import LN2, gained, shown, slope, softplus
from tests.objectives.test_comparison import told
from tests.support.tables import assert_rows, step_table


def logistic(x):
    return 1 / (1 + math.exp(-x))


PAIR = ([[2.0], [-1.0]], [1, -1])


# ---- at the reference


@pytest.mark.parametrize(
    ("compare", "wanted"),
    [
        (kto, 0.5),
        (bco_pair, 2 * LN2),
        (nca_pair, 2 * LN2),
        (apo_zero, 1.0),
        (apo_down, 1.0),
        (sppo_hard, 50.0),  # twice (1 / (2 * .1))^2
        (exo_pair, -LN2 - 0.5 * (math.log(0.999) + math.log(0.001))),
    ],
)
def test_without_evidence_a_pair_costs_what_it_must(compare, wanted):
    shown(compare(*gained([[0.0, 0.0], [0.0]], [1, -1])), wanted)


LABELLED = [kto, bco_pair, nca_pair, apo_zero, apo_down, sppo_hard, exo_pair]
each = pytest.mark.parametrize("compare", LABELLED)


@each
@pytest.mark.parametrize("level", ["row", "step"])
def test_a_row_without_a_label_changes_nothing(compare, level):
    rows = [[0.4, 0.3], [-0.2, 0.1], [5.0, 7.0]]
    reward, batch = gained(rows, [1, -1, 0])
    shown(compare(reward, batch, level=level), compare(*gained(rows[:2], [1, -1]), level=level).detach())
    assert slope(compare(reward, batch, level=level), reward).isfinite().all()


@each
@pytest.mark.parametrize("advantage", [[1, 0.5], [-1, -1], [0, 0]])
def test_a_group_of_one_side_costs_nothing_but_in_kto(compare, advantage):
    reward, batch = gained([[0.4], [0.3]], advantage)
    loss = compare(reward, batch)
    assert slope(loss, reward).isfinite().all()
    signs = (-0.1 if value > 0 else 0.1 for value in advantage)
    wanted = sum(logistic(sign * x) for sign, x in zip(signs, (0.4, 0.3), strict=True)) / 2
    shown(loss, wanted if compare is kto and any(advantage) else 0.0)


@each
@pytest.mark.parametrize(
    ("rows", "advantage"),
    [
        ([[0.4, 0.7], [0.1, 0.9]], [[1, 0], [-1, 0]]),
        ([[0.4, 0.7], [0.1]], [1, -1]),
        ([[0.4], [0.1, 0.7]], [1, -1]),
    ],
)
def test_a_column_that_decides_nothing_is_left_out_of_the_mean(compare, rows, advantage):
    reward, batch = gained(rows, advantage)
    loss = compare(reward, batch, level="step")
    assert slope(loss, reward).isfinite().all()
    wanted = compare(*gained([[0.4], [0.1]], [1, -1]), level="step").item()
    if compare is kto and advantage == [1, -1]:  # a column of one labelled row counts
        wanted = (wanted + logistic(-0.07 if len(rows[0]) == 2 else 0.07)) / 2
    shown(loss, wanted)


@pytest.mark.parametrize("wrong", [0.0, 1.0, 1.5])
def test_exo_wants_a_probability_of_wrong_labels(wrong):
    with pytest.raises(ConfigError, match="label_smoothing.* must be more than 0 and less than 1"):
        Pieces(Stream(0)).check("compare", Piece("exo_pair", {"label_smoothing": wrong}))


def test_the_weights_of_kto_are_as_precise_as_its_rewards():
    # (1.1 sigm(-.2) + .7 sigm(-.1)) / 2; 1.1 in float32 would be away by 2e-8
    loss = kto(*gained(*PAIR), desirable_weight=1.1, undesirable_weight=0.7)
    wanted = (1.1 * logistic(-0.2) + 0.7 * logistic(-0.1)) / 2
    assert abs(float(loss.detach()) - wanted) < 1e-12


def test_mpo_at_the_reference_is_its_weights_times_ln_2_and_the_likelihood():
    # .8 ln 2 + .2 * 2 ln 2 = .831777, and the mean of 1 and 3
    new, batch = step_table([[-1.0, -3.0], [-2.0]], advantage=[1, -1], ref=[[-1.0, -3.0], [-2.0]])
    loss, _ = told(
        new,
        batch,
        implicit_reward="log_ratio",
        compare=[{"name": "sigmoid", "weight": 0.8}, {"name": "bco_pair", "weight": 0.2}],
        penalty=[{"name": "sft", "coef": 1.0}],
        aggregation="group_mean",
    )
    assert_rows(loss[None], [0.831777 + 2.0])
    # the better answer alone is imitated: by halves, and pushed by the weighted comparisons
    pull = 0.1 * (0.8 * 0.5 + 0.2 * 0.5)
    assert_rows(torch.autograd.grad(loss, new.logp)[0], [[-0.5 - pull] * 2, [pull]])


# ---- away from it


def test_kto_asks_of_every_row_alone():
    # beta .5: rewards 1 and -.5; 1 - sigmoid(1 - .25) and 1 - sigmoid(.25 + .5), the mean of both
    loss = kto(*gained(*PAIR), beta=0.5, delta=0.25)
    shown(loss, (logistic(-0.75) + logistic(-0.75)) / 2)
    shown(kto(*gained(*PAIR), beta=0.5, delta=-3.0), (logistic(-1.0) + logistic(-0.5)) / 2)  # held at 0
    weighed = kto(*gained(*PAIR), beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    shown(weighed, (2 * logistic(-1.0) + 3 * logistic(-0.5)) / 2)


def test_kto_needs_no_partner():
    shown(kto(*gained([[2.0]], [1.0]), beta=0.5), logistic(-1.0))
    shown(kto(*gained([[2.0]], [-0.3]), beta=0.5), logistic(1.0))
    # two groups, one of a single row; a row of advantage 0 is nobody's
    alone = kto(*gained([[2.0], [2.0], [-1.0]], [1, 1, -1], group=[0, 1, 1]), beta=0.5)
    shown(alone, (logistic(-1.0) + (logistic(-1.0) + logistic(-0.5)) / 2) / 2)
    shown(kto(*gained([[2.0], [7.0]], [1, 0]), beta=0.5), logistic(-1.0))


def test_bco_shifts_rewards_by_delta():
    # rewards 1 and -.5 less .25: softplus(-.75) + softplus(-.75)
    shown(bco_pair(*gained(*PAIR), beta=0.5, delta=0.25), 2 * softplus(-0.75))


def test_other_pair_losses_have_worked_values():
    # rewards 1 and -.5, margin 1.5
    pair = gained(*PAIR)
    shown(nca_pair(*pair, beta=0.5), softplus(-1.0) + 0.5 * softplus(1.0) + 0.5 * softplus(-0.5))
    shown(apo_zero(*pair, beta=0.5), logistic(-1.0) + logistic(-0.5))
    shown(apo_down(*pair, beta=0.5), logistic(1.0) + logistic(-1.5))
    # gains 2 and -1 are 1 and 0 away from 1 / (2 * .5)
    shown(sppo_hard(*pair, beta=0.5), 1.0)
    # .8 ln(.8 / .9) + .2 ln(.2 / .1) at a margin of ln 4
    even = gained([[math.log(4)], [0.0]], [1, -1])
    shown(exo_pair(*even, beta=1.0, label_smoothing=0.1), 0.8 * math.log(8 / 9) + 0.2 * math.log(2))


def test_steps_may_be_labelled_one_by_one():
    # the first step prefers row 1, the second row 2; the better has the reward 1, the worse 0
    implicit_reward, batch = gained([[1.0, 0.0], [0.0, 1.0]], [[1, -1], [-1, 1]])
    shown(bco_pair(implicit_reward, batch, beta=1.0, level="step"), softplus(-1.0) + LN2)
    shown(kto(implicit_reward, batch, beta=1.0, level="step"), (logistic(-1.0) + 0.5) / 2)


# ---- rewards without a reference, and SimPO's margin


def test_simpo_wants_a_margin_of_gamma_between_means():
    # means -1 and -2, beta 2: 2 * 1 - .5 = 1.5
    new, batch = step_table([[-0.5, -1.5], [-2.0]], advantage=[1, -1])
    loss, metrics = told(
        new, batch, implicit_reward="mean_logp", compare=[{"name": "sigmoid", "beta": 2.0, "gamma": 0.5}]
    )
    assert_rows(loss[None], [softplus(-1.5)])
    assert float(metrics["rewards/chosen"]) == -2.0 and float(metrics["rewards/margins"]) == 2.0


def test_gamma_keeps_smoothed_labels_around_the_margin():
    pair = gained([[1.0], [0.0]], [1, -1])
    wanted = 0.75 * softplus(-0.6) + 0.25 * softplus(0.6)
    shown(sigmoid(*pair, beta=1.0, gamma=0.4, label_smoothing=0.25), wanted)


# ---- metrics


def test_rewards_are_beta_times_gains_of_the_first_comparison():
    new, batch = step_table([[-1.0], [-2.0]], advantage=[1, -1], ref=[[-3.0], [-1.0]])
    _, metrics = told(
        new,
        batch,
        implicit_reward="log_ratio",
        compare=[{"name": "kto", "beta": 0.25}, {"name": "ipo", "beta": 9.0}],
    )
    assert {name: float(value) for name, value in metrics.items()} == {
        "rewards/chosen": 0.5,
        "rewards/rejected": -0.25,
        "rewards/margins": 0.75,
        "rewards/accuracies": 1.0,
    }
    _, plain = told(new, batch, implicit_reward="log_ratio", compare="sigmoid")
    assert float(plain["rewards/chosen"]) == pytest.approx(0.2)  # its own default


def test_unrelated_rows_are_told_apart():
    noted = {"unrelated": [[0.0], [0.0], [1.0]]}
    new, batch = step_table(
        [[-1.0], [-2.0], [-5.0]], advantage=[1, -1, 0], ref=[[-3.0], [-1.0], [-1.0]], notes=noted
    )
    _, metrics = told(new, batch, implicit_reward="log_ratio", compare=[{"name": "kto", "beta": 0.5}])
    assert float(metrics["rewards/unrelated"]) == -2.0
    assert float(metrics["rewards/chosen"]) == 1.0 and float(metrics["rewards/rejected"]) == -0.5


def test_a_comparison_may_carry_a_weight():
    new, batch = step_table([[-1.0], [-2.0]], advantage=[1, -1], ref=[[-1.0], [-2.0]])
    loss, _ = told(new, batch, implicit_reward="log_ratio", compare=[{"name": "sigmoid", "weight": 3.0}])
    assert_rows(loss[None], [3 * LN2])
