"""DisCO: the soft maximum of wrong answers, ratios as scores, and the hinge on the KL."""

from __future__ import annotations

import math

import pytest

from mmrl.papers.disco import discriminate, kl_hinge, mean_ratio
from tests.objectives.test_compare import gained, shown, slope
from tests.support.tables import assert_rows, slope_of, step_table

# ---- DisCO: two right rows and two wrong ones
SCORES, SIGNS = [[-0.5], [-0.7], [-0.6], [-0.9]], [1, 0.5, -0.5, -1]


@pytest.mark.parametrize(("tau", "wanted"), [(None, 0.15), (10.0, 0.148875), (1.0, 0.138792)])
def test_disco_is_the_mean_of_right_scores_less_the_soft_maximum_of_wrong_ones(tau, wanted):
    shown(discriminate(*gained(SCORES, SIGNS), tau=tau), -wanted)


@pytest.mark.parametrize(
    ("tau", "weights"),
    [(None, [0.5, 0.5]), (10.0, [0.507499, 0.492501]), (1.0, [0.574443, 0.425557])],
)
def test_disco_pulls_hardest_at_the_likeliest_wrong_row(tau, weights):
    implicit_reward, batch = gained(SCORES, SIGNS)
    pull = slope(discriminate(implicit_reward, batch, tau=tau), implicit_reward)
    assert_rows(pull[:, 0], [-0.5, -0.5, *weights])


@pytest.mark.parametrize("tau", [None, 10.0])
def test_disco_leaves_groups_of_one_kind_out_and_divides_by_them(tau):
    implicit_reward, batch = gained([*SCORES, [3.0], [1.0]], [*SIGNS, 1, 1], group=[0, 0, 0, 0, 1, 1])
    loss = discriminate(implicit_reward, batch, tau=tau)
    shown(loss, discriminate(*gained(SCORES, SIGNS), tau=tau) / 2)
    assert not slope(loss, implicit_reward)[4:].any()
    for sign in (1, -1):
        implicit_reward, batch = gained([[3.0], [1.0]], [sign, sign])
        loss = discriminate(implicit_reward, batch, tau=tau)
        assert loss == 0 and not slope(loss, implicit_reward).any()


def test_disco_at_scores_of_50_is_their_difference():
    # right -50, wrong 50 and -50: the soft maximum of temperature 1 is 50 - log 2
    implicit_reward, batch = gained([[-50.0], [50.0], [-50.0]], [1, -1, -1])
    shown(discriminate(implicit_reward, batch, tau=1.0), 100 - math.log(2))


def fallen(*falls, advantage=0.0, mask=None):
    """Build rows whose log-probabilities fell by so much since they were sampled."""
    new = [[-1.0] * len(row) for row in falls]
    old = [[-1.0 + fall for fall in row] for row in falls]
    return step_table(new, advantage=[advantage] * len(falls), mask=mask, old=old)


def test_the_kl_hinge_of_disco_is_squared_above_its_bound():
    # k1: -mean d = 2e-4 gives 1000 / 2 * 1e-8, and slope 1000 * 1e-4 times -1 / L
    new, batch = fallen([3e-4, 1e-4], [0.5e-4, 0.5e-4])
    loss = kl_hinge(new, batch, estimator="k1")
    assert_rows(loss, [[5e-6, 5e-6], [0, 0]], tolerance=1e-12)
    assert_rows(slope_of(loss[:, :1], new), [[-0.1 / 2] * 2, [0, 0]])
    # k3: e^d - 1 - d of d = .3 and -.3, mean .045338
    new, batch = fallen([-0.3, 0.3])
    mean = (math.exp(0.3) + math.exp(-0.3)) / 2 - 1
    assert_rows(kl_hinge(new, batch, coef=2.0, delta=0.01), [[(mean - 0.01) ** 2] * 2], tolerance=1e-12)


def test_mean_ratio_adds_up_to_the_mean_ratio_of_the_row():
    # (2 + 1/2) / 2 and 3
    gaps = [[math.log(2), -math.log(2)], [math.log(3)]]
    new, batch = step_table([[-1.0, -1.0], [-1.0]], old=[[-1 - gap for gap in row] for row in gaps])
    implicit_reward = mean_ratio(new, batch) * batch.mask
    assert_rows(implicit_reward.sum(-1), [1.25, 3.0])
    # d ratio = ratio d log-probability
    assert_rows(slope_of(implicit_reward, new), [[1.0, 0.25], [3.0]])


def test_mean_ratio_of_the_policy_that_rolled_out_is_1():
    new, batch = step_table([[-1.0, -2.0, -3.0]])
    assert_rows((mean_ratio(new, batch) * batch.mask).sum(-1), [1.0])


def test_ratios_of_50_are_held_at_20():
    new, batch = step_table([[0.0, 0.0]], old=[[-50.0, 50.0]])
    implicit_reward = mean_ratio(new, batch)
    assert_rows(implicit_reward / math.exp(20.0), [[0.5, 0.0]])
    assert_rows(implicit_reward[:, 1:], [[0.5 * math.exp(-20.0)]], tolerance=1e-14)
    assert slope_of(implicit_reward, new).isfinite().all()
