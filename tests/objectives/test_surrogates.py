"""Per-step losses and their slopes: clipping and its variants, CISPO, SAPO, GSPO, LUSPO."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.registry import pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.objectives.surrogates import (
    cispo,
    clip,
    gamma_weight,
    geometric_ratio,
    log_likelihood,
    off_policy_mask,
    sapo,
    sequence_ratio,
    sequence_sum,
    step_ratio,
    unclipped,
)
from tests.support.tables import assert_rows, loss_of, micro_batch, moved, slope_of, step_table

# Ratios of the shared micro-batch: e^.1 e^-.2 e^.3 | e^-.4 e^.05
RHO = [[1.105171, 0.818731, 1.349859], [0.670320, 1.051271]]


def losses(surrogate, new, batch, **options):
    return surrogate(step_ratio(new, batch), new, batch, **options)


# ---- clip


def test_clip_takes_the_more_pessimistic_side():
    # advantage 1: min(rho, 1.2); advantage -1/2: half of max(rho, .8)
    new, batch = micro_batch()
    assert_rows(losses(clip, new, batch), [[-1.105171, -0.818731, -1.2], [0.4, 0.525636]])


def test_a_higher_upper_width_lets_a_likelier_step_grow_further():
    new, batch = micro_batch()
    wanted = [[-1.105171, -0.818731, -1.28], [0.4, 0.525636]]
    assert_rows(losses(clip, new, batch, epsilon_high=0.28), wanted)


def test_clip_has_no_slope_where_the_clipped_side_counts():
    # the third step (1.35 > 1.2) and the fourth (.67 < .8) are cut; elsewhere -rho * advantage
    new, batch = micro_batch()
    wanted = [[-1.105171, -0.818731, 0], [0, 0.5 * 1.051271]]
    assert_rows(slope_of(losses(clip, new, batch), new), wanted)


def test_clip_does_not_hold_back_a_correction():
    # a bad step grown to 4 and a good one shrunk to 1/4 are pulled with their full ratio
    new, batch = moved([[math.log(4.0)], [math.log(0.25)]], [-1, 1])
    assert_rows(slope_of(losses(clip, new, batch), new), [[4], [-0.25]])


def test_dual_clip_bounds_the_loss_of_a_bad_step():
    new, batch = moved([[math.log(4.0)]], [-1])
    assert_rows(losses(clip, new, batch), [[4]])
    dual = losses(clip, new, batch, dual=3.0)
    assert_rows(dual, [[3]])
    assert_rows(slope_of(dual, new), [[0]])


def test_dual_clip_leaves_good_steps_and_moderate_ratios_alone():
    new, batch = moved([[math.log(4.0)], [math.log(2.0)]], [1, -2])
    assert_rows(losses(clip, new, batch, dual=3.0), [[-1.2], [4]])


def test_two_sided_clip_bounds_the_free_ratio():
    new, batch = moved([[math.log(6.0)], [math.log(3.0)], [math.log(6.0)]], [-1, -1, 1])
    assert_rows(losses(clip, new, batch, delta=4.0), [[4], [3], [-1.2]])
    assert_rows(slope_of(losses(clip, new, batch, delta=4.0), new), [[0], [3], [0]])


def test_dual_clip_leaves_small_good_steps_alone_too():
    new, batch = moved([[0.0]], [0.5])
    assert_rows(losses(clip, new, batch, dual=3.0), [[-0.5]])


def test_log_ratios_are_held_within_20_of_0():
    new, batch = moved([[50.0], [-50.0]], [1, 1])
    assert_rows(losses(unclipped, new, batch)[:1] / math.exp(20.0), [[-1]])
    assert_rows(losses(unclipped, new, batch)[1:], [[-math.exp(-20.0)]], tolerance=1e-14)


def test_plain_never_clips():
    new, batch = micro_batch()
    wanted = [[-rho for rho in RHO[0]], [0.5 * rho for rho in RHO[1]]]
    assert_rows(losses(unclipped, new, batch), wanted)
    assert_rows(slope_of(losses(unclipped, new, batch), new), wanted)


def test_clip_with_wide_bounds_is_plain():
    new, batch = micro_batch()
    assert losses(clip, new, batch, epsilon=1.0, epsilon_high=1e9).equal(losses(unclipped, new, batch))


# ---- weights that are not differentiated


def test_log_likelihood_weighs_log_probabilities_by_the_advantage():
    new, batch = micro_batch()
    assert_rows(losses(log_likelihood, new, batch), [[0.5, 1.0, 0.2], [-1.0, -0.35]])
    assert_rows(slope_of(losses(log_likelihood, new, batch), new), [[-1, -1, -1], [0.5, 0.5]])


def test_detached_clip_bounds_the_weight_from_above():
    # 1.105171 * .5, .818731 * 1, 1.2 * .2 | -.5 * .670320 * 2, -.5 * 1.051271 * .7
    new, batch = micro_batch()
    loss = losses(cispo, new, batch, clip_max=1.2)
    assert_rows(loss, [[0.552585, 0.818731, 0.24], [-0.670320, -0.367945]])


def test_detached_clip_lets_the_slope_of_every_step_through():
    # the third step is cut to 1.2 and still pulls; no slope goes through the ratio
    new, batch = micro_batch()
    slope = slope_of(losses(cispo, new, batch, clip_max=1.2), new)
    assert_rows(slope, [[-1.105171, -0.818731, -1.2], [0.5 * 0.670320, 0.5 * 1.051271]])


def test_detached_clip_with_a_lower_bound():
    # .670320 becomes .8: -.5 * .8 * 2
    new, batch = micro_batch()
    loss = losses(cispo, new, batch, clip_min=0.8, clip_max=1.2)
    assert_rows(loss[1:], [[-0.8, -0.367945]])


# ---- soft gate


def test_soft_gate_is_a_scaled_sigmoid_of_the_ratio():
    # good steps tau 1: -4 sigm(.105171) = -2.105074; bad ones tau 1.05: (4 / 1.05) sigm(1.05 * (rho - 1)) / 2
    new, batch = micro_batch()
    wanted = [[-2.105074, -1.819225, -2.346333], [0.789168, 0.978010]]
    assert_rows(losses(sapo, new, batch), wanted)


def test_the_temperatures_of_soft_gate_are_as_precise_as_its_ratio():
    # 1.05 in float32 would be away by 5e-8
    new, batch = moved([[0.3], [0.3]], [-1, 1])
    gate = 4 / 1.05 / (1 + math.exp(-1.05 * (math.exp(0.3) - 1)))
    good = 4 / 1.3 / (1 + math.exp(-1.3 * (math.exp(0.3) - 1)))
    loss = losses(sapo, new, batch, temperature_pos=1.3)
    assert_rows(loss, [[gate], [-good]], tolerance=1e-12)


def test_soft_gate_weighs_the_slope_with_a_bump_around_1():
    new, batch = micro_batch()
    slope = slope_of(losses(sapo, new, batch), new)
    for i, (advantage, tau) in enumerate([(1.0, 1.0), (-0.5, 1.05)]):
        for t, rho in enumerate(RHO[i]):
            gate = 1 / (1 + math.exp(-tau * (rho - 1)))
            assert abs(float(slope[i, t]) + 4 * gate * (1 - gate) * rho * advantage) < 2e-6


def test_soft_gate_at_ratio_1_is_minus_two_over_tau_times_the_advantage():
    new, batch = moved([[0.0], [0.0]], [3, -2])
    assert_rows(losses(sapo, new, batch), [[-6], [4 / 1.05]])


def test_soft_gate_takes_other_temperatures():
    new, batch = moved([[0.0], [0.0]], [1, -1])
    loss = losses(sapo, new, batch, temperature_pos=2.0, temperature_neg=4.0)
    assert_rows(loss, [[-1], [0.5]])


# ---- on whole rows


def test_gspo_clips_the_ratio_of_the_row():
    # s = 1.068939 and .839457, cut to 1.04 and .97; mean of -1.04 and .485
    new, batch = micro_batch()
    options = {"epsilon": 0.03, "epsilon_high": 0.04}
    rows = clip(sequence_ratio(new, batch), new, batch, **options)
    assert_rows(rows, [[-1.04] * 3, [0.485] * 2])
    surrogate = {"name": "clip", **options}
    gspo = loss_of(new, batch, ratio="sequence_ratio", surrogate=surrogate, aggregation="sequence_mean")
    assert_rows(gspo[None], [-0.2775])


def test_luspo_counts_a_row_as_often_as_it_has_steps():
    # (3 * -1.04 + 2 * .485) / 2
    new, batch = micro_batch()
    surrogate = {"name": "clip", "epsilon": 0.03, "epsilon_high": 0.04}
    loss = loss_of(new, batch, ratio="sequence_ratio", surrogate=surrogate, aggregation="length_weighted")
    assert_rows(loss[None], [-1.075])


def test_gspo_token_has_the_slope_of_gspo_where_the_advantage_is_constant():
    new, batch = micro_batch()
    slopes = []
    for level in ("sequence", "token"):
        ratio = {"name": "sequence_ratio", "level": level}
        loss = loss_of(new, batch, ratio=ratio, surrogate="unclipped", aggregation="sequence_mean")
        slopes.append(slope_of(loss, new))
    assert_rows(slopes[1], slopes[0].tolist(), tolerance=1e-12)
    # by hand: s_1 / 3 / 2 per step of the first row
    assert_rows(slopes[0][:1], [[-1.068939 / 6] * 3])


def test_gspo_token_lets_advantages_differ_between_steps():
    new, batch = moved([[0.0, 0.0]], [[1, -3]])
    ratio = {"name": "sequence_ratio", "level": "token"}
    loss = loss_of(new, batch, ratio=ratio, surrogate="unclipped", aggregation="sequence_mean")
    assert_rows(slope_of(loss, new), [[-0.5, 1.5]])


def test_gspo_is_grpo_for_rows_of_one_step():
    new, batch = moved([[0.3], [-0.4]], [1.0, -0.5])
    pieces_of = {"surrogate": "clip", "aggregation": "sequence_mean"}
    assert loss_of(new, batch, ratio="sequence_ratio", **pieces_of) == loss_of(new, batch, **pieces_of)


def test_rloo_clips_the_ratio_of_the_whole_answer():
    # W = e^.2 = 1.221403 is cut to 1.2, and e^-.35 = .704688 to .8; mean of -1.2 and .4
    new, batch = micro_batch()
    loss = loss_of(new, batch, ratio="sequence_sum", surrogate="clip", aggregation="sequence_mean")
    assert_rows(loss[None], [-0.4])


# ---- GMPO


def test_gmpo_is_the_geometric_mean_of_ratios_clipped_in_log_space():
    # epsilon .4 clips nothing: e^(.2 / 3) and e^(-.35 / 2) / 2; .2 makes .3 to .2 and -.4 to -.2
    new, batch = micro_batch()
    for epsilon, wanted, mean in (
        (0.4, [-1.068939, 0.419729], -0.324605),
        (0.2, [-1.033895, 0.463872], -0.285012),
    ):
        ratio = {"name": "geometric_ratio", "epsilon": epsilon}
        rows = unclipped(geometric_ratio(new, batch, epsilon=epsilon), new, batch)
        assert_rows(rows[:, :2], [[value] * 2 for value in wanted])
        loss = loss_of(new, batch, ratio=ratio, surrogate="unclipped", aggregation="sequence_mean")
        assert_rows(loss[None], [mean])


def test_gmpo_has_no_slope_at_clipped_steps_and_shares_the_rest_equally():
    # the third step of the first row and the first of the second are cut; A ratio / L for the others, over 2
    new, batch = micro_batch()
    ratio = {"name": "geometric_ratio", "epsilon": 0.2}
    loss = loss_of(new, batch, ratio=ratio, surrogate="unclipped", aggregation="sequence_mean")
    assert_rows(slope_of(loss, new), [[-1.033895 / 6] * 2 + [0], [0, 0.463872 / 4]])


def test_gmpo_clips_only_towards_the_advantage_and_may_be_asymmetric():
    # a good step that became rare and a bad one that became likely are not held back
    new, batch = moved([[-1.0], [1.0], [1.0], [-1.0]], [1, -1, 1, -1])
    assert_rows(geometric_ratio(new, batch, epsilon=0.2, epsilon_high=0.3), [[-1.0], [1.0], [0.3], [-0.2]])


# ---- VESPO


def test_vespo_weighs_answers_by_a_gamma_density_of_their_ratio():
    # W e^.2 and e^-.35: e^(3 + .4 - 3 * 1.221403) = .767814 and e^(2 - 1.05 - 2 * .704688) = .631678
    new, batch = micro_batch()
    loss = gamma_weight(sequence_sum(new, batch), new, batch)
    assert_rows(loss, [[0.383907, 0.767814, 0.153563], [-0.631678, -0.221087]])
    assert_rows(slope_of(loss, new), [[-0.767814] * 3, [0.5 * 0.631678] * 2])


def test_vespo_takes_other_powers_and_holds_the_ratio_at_1e_8():
    # k 1, lambda 1: W e^(1 - W)
    new, batch = moved([[math.log(2.0)], [-50.0]], [1, 1])
    loss = gamma_weight(sequence_sum(new, batch), new, batch, k_pos=1.0, lambda_pos=1.0)
    assert_rows(loss[:1], [[2 * math.exp(-1)]])
    assert_rows(loss[1:] * 1e8, [[math.e]])


# ---- off-policy mask


def test_off_policy_mask_drops_negative_answers_that_drifted():
    # mean drifts .6, .4 and .6; the last has a positive advantage
    new, batch = moved([[-0.9, -0.3], [-0.9, 0.1], [-0.9, -0.3]], [-1, -1, 1])
    masked = partial(off_policy_mask, surrogate=unclipped)
    loss, wanted = losses(masked, new, batch), losses(unclipped, new, batch)
    assert_rows(loss, [[0, 0], wanted[1].tolist(), wanted[2].tolist()])
    assert_rows(slope_of(loss, new)[:1], [[0, 0]])
    assert_rows(losses(masked, new, batch, threshold=0.7), wanted.tolist())


def test_off_policy_mask_reads_what_its_inner_surrogate_reads():
    inner = {"name": "diffusion_nft", "against": "ema"}
    options = {"surrogate": inner, "against": "engine"}
    needs = Pieces(Stream()).make("surrogate", Piece("off_policy_mask", options)).needs
    assert needs.others == {"ema": {"velocity"}, "engine": frozenset()}
    assert needs.outputs == {"velocity", "target", "time"}


# ---- what all of them share

# Those that read fields of a flow have the like in test_fields.py.
SURROGATES = [entry for entry in pieces("surrogate") if not entry.needs.outputs]


def bound(entry):
    """Bind a surrogate with its defaults, those that are pieces too."""
    return Pieces(Stream()).make("surrogate", Piece(entry.full_name))


@pytest.mark.parametrize("entry", SURROGATES, ids=lambda entry: entry.full_name)
def test_on_policy_every_surrogate_pulls_with_minus_the_advantage(entry):
    new, batch = step_table([[-0.5, -1.0], [-2.0]], advantage=[[1.0, -3.0], 0.5])
    loss = losses(bound(entry), new, batch)
    assert_rows(slope_of(loss, new), [[-1, 3], [-0.5]])


@pytest.mark.parametrize("entry", SURROGATES, ids=lambda entry: entry.full_name)
def test_log_ratios_of_50_are_held_at_20_in_value_and_slope(entry):
    new, batch = moved([[50.0, -50.0], [50.0, -50.0]], [1, -1])
    loss = losses(bound(entry), new, batch)
    assert loss.abs().max() <= math.exp(20.0)
    assert slope_of(loss, new).isfinite().all()


@pytest.mark.parametrize("entry", SURROGATES, ids=lambda entry: entry.full_name)
def test_an_advantage_of_0_moves_nothing(entry):
    new, batch = moved([[0.5, -0.5]], [0])
    loss = losses(bound(entry), new, batch)
    assert not loss.any()
    assert not slope_of(loss, new).any()


@pytest.mark.parametrize("surrogate", [clip, unclipped, log_likelihood, sapo])
def test_the_slope_is_that_of_finite_differences_where_no_weight_is_detached(surrogate):
    new, batch = micro_batch()
    slope, small = slope_of(losses(surrogate, new, batch), new), 1e-6
    for i, t in ((0, 0), (0, 2), (1, 1)):
        bump = torch.zeros_like(new.logp)
        bump[i, t] = small
        up, down = (
            losses(surrogate, type(new)(new.logp.detach() + sign * bump), batch).sum() for sign in (1, -1)
        )
        assert abs(float(slope[i, t]) - float(up - down) / (2 * small)) < 1e-6
