"""From the gains of a group to a loss: pairs and lists, over rows and over steps."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.registry import pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Unit
from mmrl.objectives.compare import discopop, hinge, ipo, plackett_luce, robust, sigmoid
from tests.support.tables import assert_rows, padded, step_table

LN2 = math.log(2)
PAIRS = [sigmoid, robust, ipo, hinge, discopop]


def softplus(x):
    return math.log1p(math.exp(x))


def gained(implicit_reward, advantage, group=(), mask=None):
    """Give gains (N, T) that can be differentiated, and a batch."""
    _, batch = step_table(
        [[0.0] * len(row) for row in implicit_reward], advantage=advantage, group=group, mask=mask
    )
    return padded(implicit_reward).requires_grad_(), batch


def slope(loss, implicit_reward):
    return torch.autograd.grad(loss, implicit_reward)[0]


def shown(loss, wanted):
    assert_rows(loss[None], [torch.as_tensor(wanted).item()])


# ---- pairs


def test_sigmoid_is_dpo_on_a_pair():
    # Diffusion-DPO, beta 5000: -.5 * 5000 * ((.210 - .250) - (.212 - .249)) = 7.5 and ln(1 + e^-7.5)
    implicit_reward, batch = gained([[-(0.210 - 0.212)], [-(0.250 - 0.249)]], [1, -1])
    loss = sigmoid(implicit_reward, batch, beta=0.5 * 5000)
    shown(loss, 5.529e-4)
    assert_rows(loss[None], [softplus(-7.5)], tolerance=1e-12)


def test_sigmoid_adds_the_steps_of_a_row_up():
    # margin (.5 + .25) - (-.25) = 1
    implicit_reward, batch = gained([[0.5, 0.25], [-0.25]], [1, -1])
    shown(sigmoid(implicit_reward, batch, beta=2.0), softplus(-2.0))
    # its slope is -beta sigmoid(-beta margin) by every step of the better row
    pull = 2.0 / (1 + math.exp(2.0))
    assert_rows(slope(sigmoid(implicit_reward, batch, beta=2.0), implicit_reward), [[-pull, -pull], [pull]])


def test_without_evidence_a_pair_costs_ln_2():
    shown(sigmoid(*gained([[0.0], [0.0]], [1, -1])), LN2)


def test_label_smoothing_takes_a_share_of_labels_as_flipped():
    # .75 softplus(-1) + .25 softplus(1)
    pair = gained([[1.0], [0.0]], [1, -1])
    shown(sigmoid(*pair, beta=1.0, label_smoothing=0.25), 0.75 * softplus(-1) + 0.25 * softplus(1))


def test_robust_is_on_average_over_flipped_labels_the_loss_on_clean_ones():
    clean, flipped = (gained([[1.3], [0.2]], labels) for labels in ([1, -1], [-1, 1]))
    mean = 0.8 * robust(*clean, label_smoothing=0.2) + 0.2 * robust(*flipped, label_smoothing=0.2)
    shown(mean, sigmoid(*clean))
    for wrong in (0.5, -0.1):
        with pytest.raises(ConfigError, match="label_smoothing.*0.5"):
            Pieces(Stream(0)).check("compare", Piece("robust", {"label_smoothing": wrong}))
    shown(robust(*clean, label_smoothing=0.0), sigmoid(*clean))


def test_ipo_pulls_the_mean_gains_a_fixed_distance_apart():
    # means .4 and .1, 1 / (2 * .5) = 1: (.3 - 1)^2
    implicit_reward, batch = gained([[0.6, 0.2], [0.1]], [1, -1])
    shown(ipo(implicit_reward, batch, beta=0.5), 0.49)
    assert_rows(slope(ipo(implicit_reward, batch, beta=0.5), implicit_reward), [[-0.7, -0.7], [1.4]])


def test_ipo_costs_25_at_the_reference():
    shown(ipo(*gained([[0.0], [0.0]], [1, -1]), beta=0.1), 25.0)


def test_hinge_asks_for_a_margin_and_no_more():
    for margin, wanted in ((0.25, 0.5), (0.5, 0.0), (3.0, 0.0), (-1.0, 3.0)):
        shown(hinge(*gained([[margin], [0.0]], [1, -1]), beta=2.0), wanted)


def test_discopop_is_dpo_left_of_0_and_an_exponential_right_of_it():
    # x = .05 * 2 = .1, s = sigm(2); far away one of the two is left
    s = 1 / (1 + math.exp(-2))
    shown(discopop(*gained([[2.0], [0.0]], [1, -1])), (1 - s) * softplus(-0.1) + s * math.exp(-0.1))
    shown(discopop(*gained([[-3.0], [0.0]], [1, -1]), beta=1.0), softplus(3.0))
    shown(discopop(*gained([[3.0], [0.0]], [1, -1]), beta=1.0), math.exp(-3.0))
    implicit_reward, batch = gained([[-1e4], [0.0]], [1, -1])
    loss = discopop(implicit_reward, batch, beta=1.0)
    shown(loss, 1e4)
    assert_rows(slope(loss, implicit_reward), [[-1], [1]])


@pytest.mark.parametrize("compare", PAIRS)
@pytest.mark.parametrize("level", ["row", "step"])
def test_a_pair_is_the_same_when_chosen_and_rejected_swap_with_their_signs(compare, level):
    rows, signs = [[0.7, -0.1], [0.2, 0.1]], [1, -1]
    one = compare(*gained(rows, signs), level=level)
    other = compare(*gained(rows[::-1], signs[::-1]), level=level)
    shown(one, other)
    flipped = compare(*gained(rows, [-1, 1]), level=level)
    assert (one - flipped).abs() > 1e-3


@pytest.mark.parametrize("compare", PAIRS)
def test_a_group_without_two_sides_costs_nothing_and_moves_nothing(compare):
    # one row, two rows of one sign, no advantages: nothing to compare
    for advantage in ([1.0], [1.0, 0.5], [0.0, 0.0], [-1.0, -0.5], [1.0, 0.0], [0.0, -1.0]):
        implicit_reward, batch = gained([[3.0]] * len(advantage), advantage)
        loss = compare(implicit_reward, batch)
        assert loss == 0 and not slope(loss, implicit_reward).any()


@pytest.mark.parametrize("compare", PAIRS)
@pytest.mark.parametrize("level", ["row", "step"])
def test_the_loss_is_the_mean_over_groups(compare, level):
    pairs = [[[0.4], [0.1]], [[-0.2], [0.9]], [[0.3], [0.3]]]
    alone = [compare(*gained(pair, [1, -1]), level=level).item() for pair in pairs]
    rows = [row for pair in pairs for row in pair]
    both = compare(*gained(rows, [1, -1] * 3, group=[5, 5, -2, -2, 9, 9]), level=level)
    shown(both, sum(alone) / 3)


def test_a_list_of_advantages_is_one_margin():
    # DGPO: .5 * 2 + .5 * 1 - 1 * .25 = 1.25, and the slope by a gain is its advantage times one weight
    implicit_reward, batch = gained([[2.0], [1.0], [0.25]], [0.5, 0.5, -1])
    shown(sigmoid(implicit_reward, batch, beta=1.0), softplus(-1.25))
    weight = 1 / (1 + math.exp(1.25))
    assert_rows(
        slope(sigmoid(implicit_reward, batch, beta=1.0), implicit_reward),
        [[-0.5 * weight], [-0.5 * weight], [weight]],
    )


# ---- pairs, column by column


# DenseDPO, beta 500: (a, ref, b, ref) = (.20, .21, .25, .24) and (.30, .29, .28, .29)
SEGMENTS = [[-(0.20 - 0.21), -(0.30 - 0.29)], [-(0.25 - 0.24), -(0.28 - 0.29)]]


def test_segments_are_compared_one_by_one():
    # insides 5 and -5: (ln(1 + e^-5) + ln(1 + e^5)) / 2
    implicit_reward, batch = gained(SEGMENTS, [1, -1])
    shown(sigmoid(implicit_reward, batch, beta=250.0, level="step"), 2.506715)
    assert abs(softplus(-5) - 0.006715) < 1e-6 and abs(softplus(5) - 5.006715) < 1e-6


def test_segments_that_tie_are_left_out_of_the_mean():
    for mask in (None, [[1, 0], [1, 0]]):
        implicit_reward, batch = gained(SEGMENTS, [[1, 0], [-1, 0]], mask=mask)
        loss = sigmoid(implicit_reward, batch, beta=250.0, level="step")
        shown(loss, 0.006715)
        assert not slope(loss, implicit_reward)[:, 1].any()


def test_a_pair_that_ties_everywhere_costs_nothing():
    implicit_reward, batch = gained(SEGMENTS, [0, 0])
    assert sigmoid(implicit_reward, batch, level="step") == 0


@pytest.mark.parametrize("compare", [sigmoid, robust, hinge, ipo])
def test_one_segment_over_the_whole_clip_is_the_plain_pair(compare):
    pair = gained([[0.3], [-0.4]], [1, -1])
    shown(compare(*pair, level="step"), compare(*pair, level="row"))


def test_each_segment_may_prefer_another_row():
    # the first prefers a by 1, the second b by 2
    implicit_reward, batch = gained([[1.0, 0.0], [0.0, 2.0]], [[1, -1], [-1, 1]])
    shown(sigmoid(implicit_reward, batch, beta=1.0, level="step"), (softplus(-1) + softplus(-2)) / 2)


# ---- lists


def list_of(scores, rewards, **options):
    return plackett_luce(*gained([[s] for s in scores], rewards), beta=1.0, **options)


def test_gdro_has_its_worked_values():
    # no evidence, three rows: ln 3 + ln 2, whatever the rewards are
    shown(list_of([0, 0, 0], [1.0, 0.8, 0.2]), math.log(3) + LN2)
    shown(list_of([0.1, -0.2, 0.3], [1.0, 0.8, 0.2]), 2.065409)
    shown(list_of([0.1, -0.2, 0.3], [1.0, 0.8, 0.2], top1=True), 1.091335)
    # tau to 0: softplus(...) of every row against those behind it
    spread = math.log(sum(map(math.exp, (0.1, -0.2, 0.3))))
    ranking = spread - 0.1 + math.log(math.exp(-0.2) + math.exp(0.3)) + 0.2
    shown(list_of([0.1, -0.2, 0.3], [1.0, 0.8, 0.2], tau=0.0), ranking)
    shown(list_of([0.1, -0.2, 0.3], [1.0, 0.8, 0.2], tau=0.0), 2.060016)


def test_the_ranking_loss_is_the_limit_of_small_tau():
    scores, rewards = [0.1, -0.2, 0.3, 1.5], [1.0, 0.8, 0.2, 0.9]
    shown(list_of(scores, rewards, tau=1e-4), list_of(scores, rewards, tau=0.0))


@pytest.mark.parametrize("top1", [False, True])
def test_two_rows_at_small_tau_are_dpo(top1):
    # softplus(-(.3 + .1))
    shown(list_of([0.3, -0.1], [1.0, 0.0], tau=0.0, top1=top1), 0.513015)
    pair = gained([[0.3], [-0.1]], [1, -1])
    shown(list_of([0.3, -0.1], [1.0, 0.0], tau=0.0, top1=top1), sigmoid(*pair, beta=1.0))


def test_rows_are_ranked_whatever_their_order_and_beta_scales_the_scores():
    scores, rewards = [0.1, -0.2, 0.3], [1.0, 0.8, 0.2]
    for order in ([2, 0, 1], [1, 2, 0]):
        shown(list_of([scores[i] for i in order], [rewards[i] for i in order]), 2.065409)
    shown(plackett_luce(*gained([[s / 12] for s in scores], rewards)), 2.065409)  # beta is 12


def test_the_steps_of_a_row_add_up_in_a_list():
    implicit_reward, batch = gained(
        [[0.25, 0.05], [-0.1], [9.0]], [1.0, 0.0, 5.0], mask=[[1, 1], [1, 0], [0, 0]]
    )
    # the third row is not counted at all, though it would be the best
    shown(plackett_luce(implicit_reward * batch.mask, batch, beta=1.0, tau=0.0), 0.513015)


def test_lists_of_every_step_are_averaged():
    implicit_reward, batch = gained([[0.3, 2.0], [-0.1, 0.0]], [[1.0, 1.0], [0.0, 0.0]])
    wanted = (softplus(-0.4) + softplus(-2.0)) / 2
    shown(plackett_luce(implicit_reward, batch, beta=1.0, tau=0.0, level="step"), wanted)
    # a step that only one row has decides nothing
    implicit_reward, batch = gained(
        [[0.3, 2.0], [-0.1, 0.0]], [[1.0, 1.0], [0.0, 0.0]], mask=[[1, 1], [1, 0]]
    )
    shown(plackett_luce(implicit_reward, batch, beta=1.0, tau=0.0, level="step"), softplus(-0.4))


def test_the_slope_of_a_list_is_softmax_less_target():
    # one comparison of all rows: d/ds_m (ln sum exp s - sum q s) = p_m - q_m
    implicit_reward, batch = gained([[0.1], [-0.2], [0.3]], [1.0, 0.8, 0.2])
    loss = plackett_luce(implicit_reward, batch, beta=1.0, tau=0.05, top1=True)
    p = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64).softmax(0)
    q = (torch.tensor([1.0, 0.8, 0.2], dtype=torch.float64) / 0.05).softmax(0)
    torch.testing.assert_close(slope(loss, implicit_reward)[:, 0], p - q)
    assert_rows(q, [0.982014, 0.017986, 1.1e-7])


def test_equal_rewards_and_lists_of_one_cost_nothing():
    for rewards in ([0.5, 0.5, 0.5], [0.7]):
        implicit_reward, batch = gained([[3.0]] * len(rewards), rewards)
        loss = plackett_luce(implicit_reward, batch)
        assert loss == 0 and not slope(loss, implicit_reward).any()


def test_ties_keep_the_order_of_rows():
    # the first of two equal rewards stands first
    one = list_of([2.0, -1.0, 0.0], [1.0, 1.0, 0.0], tau=0.0)
    other = list_of([-1.0, 2.0, 0.0], [1.0, 1.0, 0.0], tau=0.0)
    spread = math.log(math.exp(2) + math.exp(-1) + 1)
    shown(one, spread - 2 + softplus(1.0))
    shown(other, spread + 1 + softplus(-2.0))


# ---- what all of them share

COMPARES = [entry for entry in pieces("compare") if "compare" not in entry.options]  # not what wraps one
# Comparisons of whole rows alone have no level.
LEVELS = [
    pytest.param(entry, options, id="-".join([entry.full_name, *options.values()]))
    for entry in COMPARES
    for options in ([{"level": "row"}, {"level": "step"}] if "level" in entry.options else [{}])
]


@pytest.mark.parametrize("entry", COMPARES, ids=lambda entry: entry.full_name)
def test_a_comparison_needs_whole_groups(entry):
    assert entry.needs.unit == Unit.GROUP


@pytest.mark.parametrize(("entry", "options"), LEVELS)
def test_gains_of_50_stay_finite(entry, options):
    for sign in (1, -1):
        implicit_reward, batch = gained([[50.0 * sign, 50.0 * sign], [-50.0 * sign, -50.0 * sign]], [1, -1])
        loss = entry.target(implicit_reward, batch, **options)
        assert loss.isfinite() and slope(loss, implicit_reward).isfinite().all()


@pytest.mark.parametrize("entry", COMPARES, ids=lambda entry: entry.full_name)
def test_a_row_without_counted_steps_takes_no_part(entry):
    implicit_reward, batch = gained([[0.3], [-0.1], [7.0]], [1, -1, 3], mask=[[1], [1], [0]])
    alone = entry.target(*gained([[0.3], [-0.1]], [1, -1]))
    loss = entry.target(implicit_reward * batch.mask, batch)
    shown(loss, alone)
    assert slope(loss, implicit_reward)[2] == 0


@pytest.mark.parametrize(("entry", "options"), LEVELS)
def test_the_slope_is_that_of_finite_differences(entry, options):
    rows, advantage = [[0.4, -0.3], [0.1, 0.6], [-0.5, 0.2]], [1.0, 0.2, -0.9]
    implicit_reward, batch = gained(rows, advantage)
    assert torch.autograd.gradcheck(lambda g: entry.target(g, batch, **options), (implicit_reward,))
