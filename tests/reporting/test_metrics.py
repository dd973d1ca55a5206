"""Metrics of a step under the names that TRL uses."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.normalize import group_center, group_normalize
from mmrl.advantages.shape import total
from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Trajectory
from mmrl.objectives.policy_gradient import diagnose
from mmrl.reporting.metrics import (
    Meter,
    describe_lengths,
    describe_rewards,
    describe_shares,
    describe_speed,
    noted_sums,
)
from mmrl.training.loop import train
from tests.support.tables import reward_table, step_table
from tests.support.toy_flow import STOCHASTIC, flow_plan
from tests.support.toys import prompts, toy_run

TRL = {
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "rewards/share_right/mean",
    "rewards/share_right/std",
    "rewards/brevity/mean",
    "rewards/brevity/std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "kl",
    "entropy",
    "grad_norm",
    "learning_rate",
    "loss",
    "step_time",
    "sampling/sampling_logp_difference/mean",
}


# ---- a step


def test_a_step_is_reported_under_the_names_of_trl(tmp_path):
    run = toy_run(tmp_path, references={"ref": "frozen"}, objective={"penalty": ["k3"]})
    train(run)
    records = run.journal.read()
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        assert record.keys() >= TRL
        assert all(math.isfinite(value) for value in record.values())
    assert {"time/rollout", "time/reward", "time/learn"} <= records[0].keys()
    assert records[0]["kl"] == 0.0 < records[2]["kl"]
    # The table of logits begins uniform over six tokens.
    assert records[0]["entropy"] == pytest.approx(math.log(6), rel=1e-6)


def test_options_that_follow_a_schedule_are_reported(tmp_path):
    coef = {"name": "towards", "metrics": ["ratio_variance"], "target": 0.0, "rate": 0.5, "start": 0.25}
    penalty = [{"name": "ratio_variance", "coef": coef}]
    run = toy_run(tmp_path, objective={"penalty": penalty}, learn={"num_iterations": 2})
    train(run)
    records = run.journal.read()
    found = [record["schedule/objective.penalty[0].coef"] for record in records]
    assert found[0] == 0.25
    for step in (1, 2):
        assert found[step] == pytest.approx(found[step - 1] + 0.5 * records[step - 1]["ratio_variance"])
    assert found[2] > found[1] > 0.25


def test_rewards_are_summed_with_their_weights():
    table = reward_table(
        {"right": [1.0, 0.0, 0.5, 0.5], "short": [-1.0, None, 0.0, -2.0]},
        weights={"right": 2.0, "short": 0.5},
        group=["a", "a", "b", "b"],
    )
    metrics = describe_rewards(table)
    # 2 - .5 = 1.5, 0, 1, 1 - 1 = 0: the mean is .625, squares of the distances .875, -.625, .375, -.625 add
    # up to 1.6875, a third of which is .5625.
    assert metrics["reward"] == 0.625
    assert metrics["reward_std"] == pytest.approx(0.75)
    assert metrics["rewards/right/mean"] == 0.5
    assert metrics["rewards/short/mean"] == -1.0
    assert metrics["rewards/short/std"] == pytest.approx(1.0)
    assert metrics["frac_reward_zero_std"] == 0.0
    assert not any("error_rate" in name for name in metrics)


def test_groups_whose_rewards_are_equal_are_counted():
    table = reward_table([1.0, 1.0, 0.0, 1.0, 7.0, None], group=["a", "a", "b", "b", "c", "d"])
    # The two rows of a, and the single one of c; of d nothing is known.
    assert describe_rewards(table)["frac_reward_zero_std"] == pytest.approx(3 / 5)


def test_demonstrations_are_not_what_the_policy_earned():
    table = reward_table([1.0, 3.0, 100.0], on_policy=[True, True, False], length=[1, 3, 50])
    metrics = {**describe_rewards(table), **describe_lengths(table)}
    assert (metrics["reward"], metrics["rewards/reward/mean"]) == (2.0, 2.0)
    assert metrics["completions/max_length"] == 3.0
    alone = reward_table([1.0, 3.0], on_policy=[False, False])
    assert describe_rewards(alone)["reward"] == 2.0, "unless there is nothing else"


def test_only_the_answer_of_a_row_is_its_reward():
    table = reward_table([[5.0, 1.0], [3.0]])
    assert describe_rewards(table)["reward"] == 2.0


def test_a_reward_that_applies_nowhere_is_not_a_number():
    metrics = describe_rewards(reward_table([None, None]))
    assert math.isnan(metrics["reward"]) and math.isnan(metrics["rewards/reward/mean"])
    assert metrics["rewards/reward/std"] == 0.0


# ---- components of the reward


def two_groups(**more) -> RewardTable:
    """Rows of two prompts: right is 1, 0 and 0, 2; half of short is 0, -2 and nothing."""
    return reward_table(
        {"right": [1.0, 0.0, 0.0, 2.0], "short": [0.0, -4.0, 0.0, 0.0]},
        weights={"short": 0.5},
        group=["a", "a", "b", "b"],
        **more,
    )


def test_shares_are_those_of_the_advantage_and_add_up_to_one():
    table = two_groups()
    # Distances from the means, weighted: in a .5 of right and 1 of short, 1.5 in all; in b 1 of right.
    # Centred rewards: right has .5 * 1.5 + 1 * 1 = 1.75 of 1.5 * 1.5 + 1 * 1 = 3.25, for every second row.
    centred = describe_shares(table, group_center(total(table)))
    assert list(centred) == ["rewards/right/advantage_share", "rewards/short/advantage_share"]
    assert list(centred.values()) == pytest.approx([7 / 13, 6 / 13])
    # Divided by their deviation both groups weigh as much: a third of one and all of the other.
    normalized = describe_shares(table, group_normalize(total(table), eps=0.0))
    assert list(normalized.values()) == pytest.approx([2 / 3, 1 / 3])


def test_a_reward_that_pulls_against_the_rest_has_a_negative_share():
    table = reward_table({"gain": [2.0, 0.0], "cost": [-1.0, 0.0]})
    # Distances 1 and -.5, in all .5: 1 / .5 and -.5 / .5.
    shares = describe_shares(table, group_center(total(table)))
    assert shares == pytest.approx(
        {"rewards/gain/advantage_share": 2.0, "rewards/cost/advantage_share": -1.0}
    )


def test_shares_do_not_depend_on_the_scale_or_the_sign_of_the_chain():
    table = two_groups()
    credit = group_center(total(table))
    shares = describe_shares(table, credit)
    for factor in (3.0, -0.25):
        assert describe_shares(table, credit.put(factor * credit.values)) == pytest.approx(shares)


def test_what_is_not_learned_from_or_not_known_has_no_share():
    table = two_groups()
    credit = group_center(total(table))
    only_b = credit.replace(learn=torch.tensor([[False], [False], [True], [True]]))
    assert describe_shares(table, only_b) == pytest.approx(
        {"rewards/right/advantage_share": 1.0, "rewards/short/advantage_share": 0.0}
    )
    dropped = credit.select(torch.tensor([2, 3]))
    assert describe_shares(table, dropped) == describe_shares(table, only_b)
    flat = reward_table([1.0, 1.0])
    assert describe_shares(flat, group_center(flat)) == {}, "nobody learns anything"
    labels = reward_table({"right": [1.0, 0.0], "seen": [1.0, 0.0]}, weights={"seen": 0.0})
    assert describe_shares(labels, group_center(labels)) == {"rewards/right/advantage_share": 1.0}


def test_a_row_with_several_places_counts_with_their_mean():
    table = reward_table({"early": [[1.0, 1.0], [0.0, 0.0]]}, group=["a", "a"])
    credit = table.put(torch.tensor([[[0.5, 1.5]], [[-0.5, -1.5]]], dtype=torch.float64))
    assert describe_shares(table, credit) == {"rewards/early/advantage_share": 1.0}


def test_the_spread_inside_groups_is_a_mean_over_groups():
    right = [1.0, 0.0, 0.0, 2.0, 9.0, None, 5.0, 5.0, 5.0]
    table = reward_table({"right": right}, group=list("aabbccddd"))
    metrics = describe_rewards(table)
    # Deviations of two are their distance over the root of 2: 1 and 2; then 0. A single value has no spread.
    assert metrics["rewards/right/group_std"] == pytest.approx(1 / math.sqrt(2))
    assert describe_rewards(reward_table([0.1 + 0.2, 0.3]))["rewards/reward/group_std"] == 0.0
    assert describe_rewards(reward_table([1.0, None]))["rewards/reward/group_std"] == 0.0


def test_speed_is_of_what_the_policy_made():
    table = reward_table([1.0, 0.0, 0.0], length=[4, 6, 50], on_policy=[True, True, False])
    # Two rollouts of ten steps in four seconds.
    assert describe_speed(table, 4.0) == {"time/rollouts_per_second": 0.5, "time/steps_per_second": 2.5}
    assert describe_speed(table, 0.0) == {}


def test_a_run_reports_components_and_speed(tmp_path):
    run = toy_run(tmp_path)
    train(run)
    for record in run.journal.read():
        names = ("share_right", "brevity")
        assert sum(record[f"rewards/{name}/advantage_share"] for name in names) == pytest.approx(1.0)
        assert all(record[f"rewards/{name}/group_std"] >= 0 for name in names)
        assert record["time/rollouts_per_second"] == pytest.approx(16 / record["step_time"])


def test_lengths_and_what_was_cut():
    tags = {"finish": ["stop", "length", "stop", "length"]}
    metrics = describe_lengths(reward_table([0.0] * 4, length=[2, 8, 4, 8], tags=tags))
    # (2 + 8 + 4 + 8) / 4, two of four cut, (2 + 4) / 2 ended by themselves.
    assert metrics == {
        "completions/mean_length": 5.5,
        "completions/min_length": 2.0,
        "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.5,
        "completions/mean_terminated_length": 3.0,
    }


def test_where_everything_was_cut_nothing_ended_by_itself():
    metrics = describe_lengths(reward_table([0.0], length=[8], tags={"finish": ["length"]}))
    assert metrics["completions/clipped_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in metrics


def test_rows_without_text_have_denoising_steps_and_no_completion_length():
    images = reward_table([0.0, 0.0], length=[4, 6])
    images = images.replace(ids={**images.ids, "text": torch.zeros_like(images.ends)})
    assert describe_lengths(images) == {"denoising/steps": 5.0}
    mixed = images.replace(ids={**images.ids, "text": torch.tensor([[1], [0]])})
    metrics = describe_lengths(mixed)
    assert (metrics["completions/mean_length"], metrics["denoising/steps"]) == (4.0, 6.0)


def test_a_flow_reports_no_length_of_completions(tmp_path):
    objective = {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"}
    raw = flow_plan(tmp_path, advantage=["total", "group_normalize"], objective=objective, max_steps=1)
    run = build(parse(raw, Config), quiet=True)
    train(run)
    records = run.journal.read()
    assert all(record["denoising/steps"] == STOCHASTIC for record in records)
    assert not [name for record in records for name in record if name.startswith("completions/")]


def test_notes_are_summed_over_the_steps_of_sampled_rows():
    def row(entropy, sampled=True):
        notes = {"entropy": torch.tensor(entropy)} if entropy else {}
        return Trajectory(prompts()[0], "p0", (), None, len(entropy), notes, sampled)

    rows = (row([1.0, 2.0, 3.0]), row([math.nan, 6.0]), row([]), row([100.0], sampled=False))
    assert noted_sums(rows, "entropy") == {"sum": 12.0, "steps": 4.0}


def test_divergences_are_means_over_steps():
    gap = math.log(2)
    # d = log pi / pi_ref is log 2 on one of two steps: exp(-d) + d - 1 = log 2 - 1/2, over two steps.
    new, batch = step_table([[-1.0, -1.0]], advantage=[1.0], ref=[[-1.0 - gap, -1.0]], slow=[[-1.0, -1.0]])
    metrics = diagnose(new, batch)
    assert metrics["kl"].item() == pytest.approx((gap - 0.5) / 2)
    assert metrics["kl/slow"] == 0.0


def test_the_gap_to_the_engine_is_over_noted_steps():
    new, batch = step_table(
        [[-1.0, -2.0], [-1.0]], advantage=[1.0, 1.0], notes={"logp": [[-1.5, -2.0], [None]]}
    )
    # |-1 + 1.5| = .5 on one of the three steps; nothing was noted of the last.
    assert diagnose(new, batch)["sampling/sampling_logp_difference/mean"].item() == pytest.approx(0.5 / 3)


def test_metrics_of_micro_batches_add_up_and_updates_average():
    meter = Meter()
    for share, counts in ((0.25, 1.0), (0.5, 1.0), (9.0, 0.0)):
        meter.add({"loss": torch.tensor(share)}, counts)
    meter.updates += 1
    meter.add({"loss": torch.tensor(0.25)}, 1.0)
    meter.updates += 1
    # .75 in the first update, .25 in the second; a repeated micro-batch counts 0.
    assert meter.take() == {"loss": 0.5}
    assert meter.take() == {}
