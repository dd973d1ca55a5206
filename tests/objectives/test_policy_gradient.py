"""The objective of the GRPO family: what its pieces need, how they join, and what it reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mmrl.core.types import Clock, Unit
from mmrl.schedules import Towards
from tests.support.tables import (
    assert_rows,
    loss_of,
    micro_batch,
    moved,
    objective_of,
    slope_of,
    step_table,
)

GRPO = {"surrogate": "clip", "aggregation": "sequence_mean"}


def metrics_of(new, batch, **pieces):
    objective = objective_of(**pieces)
    return objective(new, batch.replace(weight=objective.weigh(batch)))[1]


def test_grpo_with_a_penalty_is_the_sum_of_both():
    # the clipped loss -.289241, and .04 times k3 at .3 (.040818) on every one of the averaged steps
    new, batch = micro_batch()
    reference = torch.where(batch.mask > 0, new.logp.detach() - 0.3, 0.0)
    batch = batch.replace(others={**batch.others, "ref": type(new)(reference)})
    loss = loss_of(new, batch, **GRPO, penalty=[{"name": "k3", "coef": 0.04}])
    assert_rows(loss[None], [-0.289241 + 0.04 * 0.040818])


def test_several_penalties_add_up():
    new, batch = step_table([[-1.0]], advantage=[0], ref=[[-1.3]], ema=[[-1.5]])
    penalties = [{"name": "k1", "coef": 1.0}, {"name": "k1", "coef": 2.0, "against": "ema"}]
    # .3 + 2 * .5
    assert_rows(loss_of(new, batch, **GRPO, penalty=penalties)[None], [1.3])


def test_its_needs_are_those_of_its_pieces():
    objective = objective_of(
        **GRPO,
        ratio="sequence_ratio",
        step_weight="truncated_importance",
        penalty=[{"name": "k3", "against": "ema"}, "entropy_bonus"],
    )
    assert objective.needs.unit == Unit.ROW
    assert objective.needs.outputs == {"entropy"}
    assert set(objective.needs.others) == {"old", "engine", "ema"}


def test_plain_grpo_needs_nothing_and_cuts_anywhere():
    needs = objective_of(**GRPO).needs
    assert (needs.unit, needs.outputs, dict(needs.others)) == (Unit.STEP, frozenset(), {})


@pytest.mark.parametrize("ratio", ["step_ratio", "sequence_ratio", "sequence_sum"])
@pytest.mark.parametrize("max_steps", [1, 3, 5, 100])
def test_losses_of_micro_batches_add_up(ratio, max_steps):
    new, batch = micro_batch()
    objective = objective_of(**GRPO, ratio=ratio)
    batch = batch.replace(weight=objective.weigh(batch))
    whole = objective(new, batch)[0]
    parts = []
    for micro in batch.split(max_steps, objective.needs.unit):
        rows, columns = micro.steps.rows, micro.steps.columns
        parts.append(objective(type(new)(new.logp[rows][:, columns]), micro)[0])
    assert max_steps == 100 or len(parts) > 1
    assert_rows(sum(parts)[None], [whole.item()], tolerance=1e-12)
    assert_rows(slope_of(sum(parts), new), slope_of(whole, new).tolist(), tolerance=1e-12)


def test_steps_outside_the_mask_do_not_pull():
    new, batch = step_table([[-1.0, -1.0]], mask=[[1, 0]], advantage=[1.0])
    assert_rows(slope_of(loss_of(new, batch, **GRPO), new), [[-1, 0]])


# ---- what it reports


def test_clip_ratio_is_the_share_of_steps_cut_below_and_above():
    # the third step is cut above, the fourth below; five steps
    new, batch = micro_batch()
    metrics = metrics_of(new, batch, **GRPO)
    assert float(metrics["clip_ratio/high_mean"]) == pytest.approx(1 / 5)
    assert float(metrics["clip_ratio/low_mean"]) == pytest.approx(1 / 5)
    assert float(metrics["clip_ratio/region_mean"]) == pytest.approx(2 / 5)


def test_steps_of_advantage_0_and_steps_pulled_back_are_not_clipped():
    new, batch = moved([[math.log(4.0), math.log(4.0)]], [[0, -1]])
    assert metrics_of(new, batch, **GRPO)["clip_ratio/region_mean"] == 0


def test_a_surrogate_without_a_slope_through_the_ratio_reports_no_clipping():
    new, batch = micro_batch()
    metrics = metrics_of(new, batch, surrogate="cispo", aggregation="step_mean")
    assert not any(name.startswith("clip_ratio") for name in metrics)


def test_reporting_adds_nothing_to_the_slope_and_works_without_gradient():
    new, batch = micro_batch()
    with torch.no_grad():
        metrics = metrics_of(new, batch, **GRPO)
    assert float(metrics["clip_ratio/region_mean"]) == pytest.approx(2 / 5)


def test_kl_is_the_mean_of_k3_over_steps_to_every_reference():
    # .040818 at .3, on both steps; 0 to the moving average
    new, batch = step_table([[-1.0, -1.0]], advantage=[1], ref=[[-1.3, -1.3]], ema=[[-1.0, -1.0]])
    metrics = metrics_of(new, batch, **GRPO)
    assert float(metrics["kl"]) == pytest.approx(0.040818, abs=2e-6)
    assert float(metrics["kl/ema"]) == 0


def test_the_distance_to_the_engine_skips_steps_that_it_did_not_note():
    # log-probabilities -1 and noted -1.3 on one of two steps; k3 of the engine from the policy is e^.3 - 1.3
    new, batch = step_table([[-1.0, -1.0]], advantage=[1], notes={"logp": [[-1.3, None]]})
    metrics = metrics_of(new, batch, **GRPO)
    assert float(metrics["sampling/sampling_logp_difference/mean"]) == pytest.approx(0.3 / 2)
    assert float(metrics["sampling/kl"]) == pytest.approx((math.exp(0.3) - 1.3) / 2)


def test_importance_weights_are_averaged_over_steps_and_over_whole_answers():
    # Policy over engine is 2 and 1/2 in the first answer, 2 and unknown in the second: of 4 steps, 3 weigh
    # 2 + .5 + 2 and their squares 4 + .25 + 4; answers weigh 1 and 2.
    two = math.log(2.0)
    new, batch = step_table(
        [[-1.0, -1.0], [-1.0, -1.0]],
        advantage=[1, 1],
        notes={"logp": [[-1 - two, -1 + two], [-1 - two, None]]},
    )
    batch = batch.replace(steps=replace(batch.steps, unit=Unit.ROW))
    metrics = metrics_of(new, batch, **GRPO)
    found = [float(metrics[f"moments/{unit}/{power}"]) for unit in ("steps", "rows") for power in (0, 1, 2)]
    assert found == pytest.approx([3 / 4, 4.5 / 4, 8.25 / 4, 1, 1.5, 2.5])
    cut = batch.replace(steps=replace(batch.steps, unit=Unit.STEP))
    assert not any(name.startswith("moments/rows") for name in metrics_of(new, cut, **GRPO))


def test_a_step_weight_multiplies_weights():
    # twice and half as likely as under the engine; two steps in the mean
    new, batch = step_table([[-1.0, -1.0]], old=[[-1.0, -1.0]], engine=[[-1 - math.log(2), -1 + math.log(2)]])
    weight = objective_of(**GRPO, step_weight="truncated_importance").weigh(batch)
    assert_rows(weight, [[1.0, 0.25]])


def test_the_kl_leaves_out_steps_that_do_not_count_and_bounds_the_exponential():
    # log-ratios 30, where k3 is 29, and -30, where it is held at -20; the third step is not counted
    new, batch = step_table([[-1.0] * 3], mask=[[1, 1, 0]], ref=[[-31.0, 29.0, -9.0]])
    wanted = (29 + math.exp(20) - 21) / 2
    assert float(metrics_of(new, batch, **GRPO)["kl"]) == pytest.approx(wanted, rel=1e-12)
    new, batch = step_table([[-1.0] * 3], mask=[[1, 1, 0]], notes={"logp": [[29.0, -31.0, -9.0]]})
    metrics = metrics_of(new, batch, **GRPO)
    assert float(metrics["sampling/kl"]) == pytest.approx(wanted, rel=1e-12)
    assert float(metrics["moments/steps/1"]) == pytest.approx(math.exp(20) / 2, rel=1e-12)


def test_answers_of_which_nothing_was_noted_have_no_importance_weight():
    # ratios of answers e^.1 and e^30, held at e^20; the second answer has no notes
    new, batch = step_table(
        [[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
        notes={"logp": [[-1.1, -1.0], [None, None], [-16.0, -16.0]]},
    )
    batch = batch.replace(steps=replace(batch.steps, unit=Unit.ROW))
    metrics = metrics_of(new, batch, **GRPO)
    assert float(metrics["moments/rows/0"]) == pytest.approx(2 / 3)
    assert float(metrics["moments/rows/1"]) == pytest.approx((math.exp(0.1) + math.exp(20)) / 3, rel=1e-12)


def test_the_variance_of_the_ratio_is_what_its_multiplier_follows():
    new, batch = micro_batch()
    found = metrics_of(new, batch, **GRPO)["ratio_variance"]
    assert float(found) == pytest.approx(0.055528, abs=2e-6)
    multiplier = Towards(metrics=("ratio_variance",), target=0.01, rate=0.1, start=0.04)
    assert multiplier(Clock(1, {"ratio_variance": float(found)})) == pytest.approx(0.044553, abs=1e-6)
    assert "ratio_variance" not in metrics_of(new, batch.replace(others={}), **GRPO)
