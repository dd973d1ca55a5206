"""KL inside the reward, against the sums by hand and in a training run."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.kl import kl_in_reward
from mmrl.advantages.normalize import leave_one_out
from mmrl.advantages.select import per_step
from mmrl.config.schema import ConfigError
from mmrl.training.collect import collect
from mmrl.training.loop import add_reference_outputs, learnable, train
from tests.support.tables import assert_rows, reward_table
from tests.support.toys import toy_run

pytestmark = pytest.mark.usefixtures("no_page")

# Two answers of three and one steps: log pi - log pi_ref is (0.2, -0.1, 0.4) and 0.5.
NOTES = {"logp": [[-1.0, -1.0, -1.0], [-1.0]], "ref/logp": [[-1.2, -0.9, -1.4], [-1.5]]}


def kept(**options):
    return reward_table([1.0, 0.0], length=[3, 1], ends=[[3], [1]], notes=NOTES), options


def test_an_answer_loses_the_kl_of_its_steps():
    table, _ = kept()
    # 1 - 0.1 * 0.5 and 0 - 0.1 * 0.5
    assert_rows(kl_in_reward(table, coef=0.1).values[:, 0], [[0.95], [-0.05]])


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [
        ("k1", 0.5),
        ("k2", 0.02 + 0.005 + 0.08),
        ("k3", sum(math.exp(-d) + d - 1 for d in (0.2, -0.1, 0.4))),
    ],
)
def test_estimators(estimator, wanted):
    table, _ = kept()
    assert kl_in_reward(table, coef=1.0, estimator=estimator).values[0, 0, 0] == pytest.approx(1 - wanted)


def test_rloo_compares_rewards_with_the_kl_in_them():
    notes = {"logp": [[-1.0], [-2.0], [-1.0]], "ref/logp": [[-1.5], [-2.0], [-0.5]]}
    table = kl_in_reward(reward_table([1.0, 0.0, 0.0], notes=notes), coef=0.2)
    # r' = 0.9, 0, 0.1; each minus the mean of the others: 0.85, -0.5, -0.35
    assert_rows(leave_one_out(table).values[:, 0], [[0.85], [-0.5], [-0.35]])


def test_a_step_loses_the_kl_from_it_to_the_end():
    table, _ = kept()
    # REINFORCE++: R_t = r - beta (k_t + ... + k_T) = 1 - 0.5, 1 - 0.3, 1 - 0.4
    found = kl_in_reward(per_step(table), coef=1.0)
    assert_rows(found.values[:, 0], [[0.5, 0.7, 0.6], [-0.5]])


PLAN = {
    "advantage": ["total", {"name": "kl_in_reward", "coef": 0.1}, "leave_one_out"],
    "references": {"ref": {"name": "ema", "decay": 0.5}},
    "max_steps": 3,
}


def test_the_chain_hears_the_reference(tmp_path):
    run = toy_run(tmp_path, **PLAN)
    train(run)
    collection = collect(run)
    notes = add_reference_outputs(run, collection, run.learner.chain).notes["ref/logp"]
    weights = run.method.references["ref"].weights["table"].log_softmax(-1)
    for i, row in enumerate(collection.rollouts):
        place, tokens = row.steps
        wanted = weights[place, torch.arange(len(tokens)), tokens].double()
        torch.testing.assert_close(notes[i, : row.length], wanted, atol=1e-6, rtol=0)
        assert notes[i, row.length :].isnan().all()
    assert "ref/logp" not in collection.table.notes
    _, credit, _ = learnable(run, collection)
    assert torch.isfinite(credit.values).all() and not torch.isnan(notes[:, 0]).any()


def test_a_chain_without_its_reference_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"the advantage chain reads \['ref'\], but `references` has nothing"
    ):
        toy_run(tmp_path, advantage=PLAN["advantage"])
