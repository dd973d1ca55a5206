"""The objective that compares rows: what it joins, how it is cut, and what it reports."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.step_table import StepOutput
from mmrl.core.types import Unit
from tests.support.tables import assert_rows, padded, slope_of, step_table

DPO = {"implicit_reward": "log_ratio", "compare": [{"name": "sigmoid", "beta": 1.0}]}
WEIGHED = {"compare": {"name": "sigmoid", "beta": 1.0}}


def comparison(**pieces):
    return Pieces(Stream()).make("objective", Piece("comparison", pieces))


def told(new, batch, **pieces):
    """Give loss and metrics of one update."""
    objective = comparison(**pieces)
    return objective(new, batch.replace(weight=objective.weigh(batch)))


def pairs():
    """Build two pairs: margins .5 - (-.25) = .75 of two steps each, and -1 of one step."""
    return step_table(
        [[-1.0, -1.0], [-2.0, -2.0], [-3.0], [-1.0]],
        advantage=[1, -1, 1, -1],
        group=[7, 7, 3, 3],
        ref=[[-1.25, -1.25], [-1.75, -2.0], [-2.5], [-1.5]],
    )


def softplus(x):
    return math.log1p(math.exp(x))


def test_dpo_is_the_mean_over_pairs():
    loss, _ = told(*pairs(), **DPO)
    assert_rows(loss[None], [(softplus(-0.75) + softplus(1.0)) / 2])


def test_several_comparisons_and_penalties_add_up():
    new, batch = pairs()
    terms = ["sigmoid", {"name": "hinge", "beta": 1.0}]
    penalty = [{"name": "k1", "coef": 1.0}]
    one, two = (told(new, batch, implicit_reward="log_ratio", compare=term)[0] for term in terms)
    loss, _ = told(new, batch, implicit_reward="log_ratio", compare=terms, penalty=penalty)
    # gaps .25 .25 | -.25 0 | -.5 | .5: means of rows .25, -.125, -.5, .5 average to .03125
    assert_rows(loss[None], [(one + two).item() + 0.03125])


def test_the_aggregate_is_of_the_penalties():
    new, batch = pairs()
    options = {**DPO, "penalty": [{"name": "k1", "coef": 1.0}]}
    plain = told(new, batch, **DPO)[0]
    for aggregation, wanted in (("sequence_mean", 0.03125), ("step_mean", 0.25 / 6), ("group_mean", 0.0625)):
        assert_rows((told(new, batch, **options, aggregation=aggregation)[0] - plain)[None], [wanted])


def test_its_needs_are_those_of_its_pieces_and_whole_groups():
    needs = comparison(
        implicit_reward={"name": "log_ratio", "against": "ema"}, compare="ipo", penalty="k3"
    ).needs
    assert needs.unit == Unit.GROUP
    assert set(needs.others) == {"ema", "ref"}
    assert not needs.outputs


@pytest.mark.parametrize("max_steps", [1, 4, 100])
def test_losses_and_metrics_of_micro_batches_add_up(max_steps):
    new, batch = pairs()
    objective = comparison(**DPO, penalty=["k2"])
    batch = batch.replace(weight=objective.weigh(batch))
    whole, metrics = objective(new, batch)
    parts = []
    for micro in batch.split(max_steps, objective.needs.unit):
        rows, columns = micro.steps.rows, micro.steps.columns
        parts.append(objective(StepOutput(new.logp[rows][:, columns]), micro))
    assert len(parts) == (1 if max_steps == 100 else 2)
    assert_rows(sum(part[0] for part in parts)[None], [whole.item()], tolerance=1e-12)
    assert_rows(slope_of(sum(part[0] for part in parts), new), slope_of(whole, new).tolist(), tolerance=1e-12)
    for name, value in metrics.items():
        assert float(sum(part[1][name] for part in parts)) == pytest.approx(float(value), abs=1e-12)


def test_it_tells_what_better_and_worse_rows_gained():
    _, metrics = told(*pairs(), **DPO)
    # .5 and -.5 in the mean; -.25 and .5; the first pair is in order, the second is not
    wanted = {"chosen": 0.0, "rejected": 0.125, "margins": -0.125, "accuracies": 0.5}
    assert {name.removeprefix("rewards/"): float(value) for name, value in metrics.items()} == pytest.approx(
        wanted
    )


def test_better_rows_of_a_list_of_rewards_are_those_above_the_mean():
    # the mean is 1/2, at which the last row is neither
    new, batch = step_table(
        [[-1.0]] * 4, advantage=[1.0, 0.75, -0.25, 0.5], ref=[[-1.3], [-1.1], [-0.5], [-9.0]]
    )
    _, metrics = told(new, batch, implicit_reward="log_ratio", compare="plackett_luce")
    # gains .3 .1 | -.5, times a beta of 12
    assert float(metrics["rewards/chosen"]) == pytest.approx(2.4)
    assert float(metrics["rewards/rejected"]) == pytest.approx(-6.0)
    assert float(metrics["rewards/accuracies"]) == 1


def test_steps_outside_the_mask_neither_count_nor_pull():
    new, batch = step_table(
        [[-1.0, -9.0], [-1.0, -1.0]],
        mask=[[1, 0], [1, 1]],
        advantage=[1, -1],
        ref=[[-1.5, 0.0], [-1.0, -1.0]],
    )
    for compare in ("sigmoid", "plackett_luce"):
        terms = {"implicit_reward": "log_ratio", "compare": {"name": compare, "beta": 1.0}}
        loss, metrics = told(new, batch, **terms)
        # the list has the rewards 1 and -1: its first row wins by far
        assert_rows(loss[None], [softplus(-0.5)])
        assert slope_of(loss, new)[0, 1] == 0
        assert float(metrics["rewards/margins"]) == 0.5


def test_a_batch_without_groups_costs_nothing():
    new, batch = step_table([[-1.0]], mask=[[0]], advantage=[0], ref=[[-2.0]])
    loss, metrics = told(new, batch, **DPO, penalty=["k3"])
    assert loss == 0 and not slope_of(loss, new).any()
    assert all(torch.isfinite(value) for value in metrics.values())


def test_rewards_have_the_beta_of_the_first_comparison():
    new, batch = step_table([[-1.0], [-1.0]], advantage=[1, -1], ref=[[-1.5], [-1.0]])
    terms = [{"name": "sigmoid", "beta": 2.0}, {"name": "bco_pair", "beta": 0.1}]
    _, metrics = told(new, batch, implicit_reward="log_ratio", compare=terms)
    assert float(metrics["rewards/chosen"]) == pytest.approx(1.0)


def test_a_row_that_is_not_counted_moves_no_mean_of_its_group():
    # Around .7 the second row is worse; the third, at 0, would make it better than the mean.
    new, batch = step_table(
        [[-1.0]] * 3, advantage=[0.9, 0.5, 0], mask=[[1], [1], [0]], ref=[[-1.5], [-1.25], [-1.0]]
    )
    _, metrics = told(new, batch, implicit_reward="log_ratio", compare={"name": "sigmoid", "beta": 1.0})
    assert float(metrics["rewards/chosen"]) == 0.5
    assert float(metrics["rewards/rejected"]) == 0.25


def test_unrelated_rows_are_told_apart():
    # noted on one step of two; neither better nor worse, and outside the mean of the others, 1/2
    new, batch = step_table(
        [[-1.0], [-1.0], [-1.0, -1.0]],
        advantage=[1, 0, 0],
        ref=[[-1.5], [-1.25], [-3.0, -3.0]],
        notes={"unrelated": [[0], [0], [1, 0]]},
    )
    _, metrics = told(new, batch, implicit_reward="log_ratio", compare={"name": "sigmoid", "beta": 1.0})
    found = [float(metrics[f"rewards/{name}"]) for name in ("chosen", "rejected", "unrelated")]
    assert found == [0.5, 0.25, 4.0]


def test_better_rows_have_more_where_merit_and_gain_agree():
    def agreed(advantage, gains):
        new, batch = step_table([[0.0]] * 3, advantage=advantage, ref=[[-gain] for gain in gains])
        _, metrics = told(new, batch, implicit_reward="log_ratio", compare={"name": "sigmoid", "beta": 1.0})
        return float(metrics["rewards/accuracies"])

    # merits 2 -1 -1: 8 - .1 - 1; the last gains as much as it loses
    assert agreed([2.0, -1.0, -1.0], [4.0, 0.1, 1.0]) == 1
    assert agreed([2.0, -1.0, -1.0], [0.5, 0.5, 0.5]) == 0


def test_wpo_weighs_pairs_by_their_likelihood():
    new, batch = pairs()
    sums = [[0.5, 0.5], [0.25, 0.25], [0.1], [0.9]]  # of squared probabilities, by step
    new = StepOutput(new.logp, {"sum_p2": padded(sums, 1.0)})
    # mean of logp - log sum: -1 - log .5 and -2 - log .25 (one step of the two gains .25); -3 and -1
    first = math.exp(-3) / (0.5 * 0.25)
    second = math.exp(-4) / (0.1 * 0.9)
    loss, metrics = told(new, batch, implicit_reward="log_ratio", compare=[{"name": "wpo", **WEIGHED}])
    assert float(loss) == pytest.approx((first * softplus(-0.75) + second * softplus(1.0)) / 2)
    pull = first / (1 + math.exp(0.75)) / 2  # the weights have no gradient
    assert_rows(slope_of(loss, new)[:2], [[-pull, -pull], [pull, pull]])
    capped, _ = told(
        new, batch, implicit_reward="log_ratio", compare=[{"name": "wpo", "max_weight": 0.3, **WEIGHED}]
    )
    assert float(capped) == pytest.approx((0.3 * softplus(-0.75) + second * softplus(1.0)) / 2)
    _, plain = told(new, batch, **DPO)
    assert metrics == plain  # with the beta of the comparison inside
