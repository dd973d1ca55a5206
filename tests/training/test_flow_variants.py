"""The worked numbers of methods for flow models, through the variants as they are shipped."""

from __future__ import annotations

import pytest
import torch

from mmrl.cli.check import check_file
from mmrl.config.binding import Pieces
from mmrl.config.loading import merge, read
from mmrl.config.schema import ConfigError, as_piece
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Clock
from tests.support.tables import ListedSteps, assert_rows, prefix_rewards, reward_table, step_table
from tests.test_configs import CONFIGS, PICTURES, chained, of_variant


def loss_of(name, new, batch):
    objective = Pieces(Stream()).make("objective", as_piece(of_variant(name)["objective"], ""))
    return objective(new, batch.replace(weight=objective.weigh(batch)))[0][None]


# ---- files


def test_a_variant_gives_options_to_a_policy_that_the_run_names(tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"include: [{CONFIGS / 'methods' / 'flow' / 'awm.yaml'}]\n"
        "policy: {name: diffusion.flow, model: somewhere, likelihood: {draws: 2}}\n"
    )
    chosen = merge(PICTURES, read(tmp_path / "run.yaml"))["policy"]
    likelihood = {"name": "diffusion.matching", "weighting": "ghuber", "power": 0.25, "draws": 2}
    assert chosen == {"name": "diffusion.flow", "model": "somewhere", "likelihood": likelihood}
    (tmp_path / "wrong.yaml").write_text("policy: {likelihood: {name: diffusion.matching, drws: 2}}")
    with pytest.raises(ConfigError, match="policy.likelihood: .*did you mean 'draws'"):
        check_file(tmp_path / "wrong.yaml")


# ---- chains


def test_tp_grpo_normalises_every_step_within_its_group():
    table = prefix_rewards([0, 0.3, 0.25], [0, -0.1, -0.05], [0, 0.1, 0.1], [0, -0.1, -0.1])
    wanted = [[1.506648, -1.410225], [-0.903989, 1.410225], [0.301330, 0], [-0.903989, 0]]
    assert_rows(chained("tp_grpo", table), wanted)


def test_tp_grpo_without_the_constraint_credits_the_first_step_with_all_that_is_gained():
    # the first row: .25 instead of .3; the second, of the trend -.05, has -.05 instead of -.1
    table = prefix_rewards([0, 0.3, 0.25], [0, -0.1, -0.05])
    free, bound = (chained(name, table)[:, 0] for name in ("tp_grpo_unconstrained", "tp_grpo"))
    # half the distance d of two is their population deviation: (d / 2) / (d / 2 + 1e-4)
    assert_rows(free, [0.15 / 0.1501, -0.15 / 0.1501])
    assert_rows(bound, [0.2 / 0.2001, -0.2 / 0.2001])


def test_flow_grpo_divides_by_the_deviation_of_the_collection():
    # [1, 0, 0, 1] alone: +-.999800; a second group of equals halves the variance and is dropped itself
    alone = chained("flow_grpo", reward_table([1, 0, 0, 1]))
    assert_rows(alone[:, 0], [0.999800, -0.999800, -0.999800, 0.999800])
    table = chained("flow_grpo", reward_table([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5], group="aaaabbbb"))
    assert_rows(table[:4, 0], [0.5 / (0.125**0.5 + 1e-4) * sign for sign in (1, -1, -1, 1)])
    assert not table[4:].any()


def test_awm_brings_advantages_to_within_1():
    # +-.999800, limited to 5, times a fifth
    assert_rows(chained("awm", reward_table([1, 0]))[:, 0], [0.19996, -0.19996])


def test_vgpo_gives_equal_rows_a_tenth_of_their_value():
    # constant values weigh 1; the group says nothing
    table = reward_table([[0.0, 0.0, 1.0]] * 3)
    wanted = 0.1 * torch.tensor([0.9801, 0.99, 1.0]) * torch.tensor([0.9801, 0.99, 1.0]) / (2.9701 / 3)
    assert_rows(chained("vgpo", table), [wanted.tolist()] * 3)


# ---- objectives


def fields(**named):
    extra = {name: torch.tensor(value, dtype=torch.float64) for name, value in named.items()}
    return StepOutput(torch.zeros(1, 1, dtype=torch.float64), extra)


def test_diffusion_nft_has_its_worked_loss():
    new = fields(velocity=[[[0.5, -0.1]]], target=[[[0.6, -0.3]]], time=[[0.5]])
    old = fields(velocity=[[[0.7, -0.4]]])
    one = torch.ones(1, 1, dtype=torch.float64)
    group = torch.zeros(1, dtype=torch.int64)
    batch = Batch.of(ListedSteps(group, group, group), one, {})
    batch = batch.replace(advantage=0.4 * one, others={"old": old, "ref": old})
    # 5 (.54 * .0833333 + .46 * .1785714) and 1e-4 * .065
    assert_rows(loss_of("diffusion_nft", new, batch.replace(totals=batch.count())), [0.6357208])


def test_dense_dpo_has_its_worked_loss():
    rows, reference = [[-0.20, -0.30], [-0.25, -0.28]], [[-0.21, -0.29], [-0.24, -0.29]]
    new, batch = step_table(rows, advantage=[1, -1], ref=reference)
    # insides 5 and -5: (.006715 + 5.006715) / 2
    assert_rows(loss_of("dense_dpo", new, batch), [2.506715])


def test_diffusion_dpo_takes_half_of_the_beta_of_flow_ports():
    # -.5 * 2000 ((.210 - .250) - (.212 - .249)) = 3, and ln(1 + e^-3) = .048587
    new, batch = step_table([[-0.210], [-0.250]], advantage=[1, -1], ref=[[-0.212], [-0.249]])
    assert_rows(loss_of("diffusion_dpo", new, batch), [0.048587])


def test_gdro_ranks_and_imitates():
    # scores .1 -.2 .3 over 12; the ranking 2.065409, and half the error .4 of the best
    scores = [0.1, -0.2, 0.3]
    new = [[-0.4], [-0.5], [-0.6]]
    ref = [[row[0] - score / 12] for row, score in zip(new, scores, strict=True)]
    new, batch = step_table(new, advantage=[1.0, 0.8, 0.2], ref=ref)
    assert_rows(loss_of("gdro", new, batch), [2.065409 + 0.5 * 0.4])


def test_dgpo_has_the_gradient_of_its_group_weight():
    # w = sigmoid(beta / G sum A (d - d_ref)), here of -4.17 (.01 + .02); the slope by d is beta w A
    new, batch = step_table([[-0.2], [-0.3]], advantage=[1, -1], ref=[[-0.21], [-0.28]])
    (slope,) = torch.autograd.grad(loss_of("dgpo", new, batch), new.logp)
    weight = float(torch.sigmoid(torch.tensor(-4.17 * 0.03, dtype=torch.float64)))
    assert_rows(-slope, [[4.17 * weight], [-4.17 * weight]])


# ---- schedules


def at(steps, piece):
    schedule = Pieces(Stream()).make("schedule", as_piece(piece, ""))
    return torch.tensor([schedule(Clock(step)) for step in steps], dtype=torch.float64)


def test_moving_averages_follow_their_papers():
    awm, nft = (of_variant(name)["references"]["ema"]["decay"] for name in ("awm", "diffusion_nft"))
    assert_rows(at([0, 100, 300, 1000], awm), [0, 0.1, 0.3, 0.3])
    assert_rows(at([0, 100, 500, 1000], nft), [0, 0.1, 0.5, 0.5])


def test_the_window_of_mix_grpo_slides_from_early_to_late_steps_and_begins_anew():
    options = of_variant("mix_grpo")["rollout"]["engine"][0]
    # 23 places of 25 updates each
    starts = at([0, 24, 25, 520, 574, 575], options["window_start"])
    assert starts.tolist() == [0, 0, 1, 20, 22, 0]
    # the code trains none of the last two of 25 steps
    assert options["stochastic"] == [0, options["num_inference_steps"] - 2] and options["window_shrinks"]
