"""References inside a run: whose weights roll out, who is asked, and names that survive data parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmrl.references import ema, frozen, trained
from mmrl.training.collect import collect
from mmrl.training.loop import learnable, update
from tests.support.toys import ToyText, toy_run

SLOW = {"rollout": {"policy": "slow"}, "references": {"slow": {"name": "ema", "decay": 0.75}}}


class Wrapped(nn.Module):
    """What data parallelism does to a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_the_recursion_of_a_moving_average():
    policy = ToyText(num=1, length=1, vocab=2)
    average = ema(policy, decay=0.75)
    found = []
    for value in (4.0, 8.0, -4.0):
        policy.table.data.fill_(value)
        average.update()
        found.append(average.weights["table"][0, 0, 0].item())
    # From 0: .25 * 4 = 1; .75 * 1 + .25 * 8 = 2.75; .75 * 2.75 - .25 * 4 = 1.0625
    assert found == [1.0, 2.75, 1.0625]


def test_another_policy_rolls_out_while_the_learner_keeps_its_weights(tmp_path):
    run = toy_run(tmp_path, **SLOW)
    # The learner always says 3, its moving average still draws anything.
    run.policy.table.data[..., 3] = 100.0
    run.tick(0)
    collection = collect(run)
    said = " ".join(row.outcomes[0].text for row in collection.rollouts).split()
    assert len(set(said)) > 3
    assert (run.policy.table[..., 3] == 100.0).all()
    run.config = toy_run(tmp_path / "b").config
    said = {row.outcomes[0].text for row in collect(run).rollouts}
    assert said == {"3 3 3 3"}


def test_the_learner_has_its_weights_back_when_a_rollout_fails(tmp_path):
    run = toy_run(tmp_path, **SLOW)
    run.policy.table.data.fill_(7.0)

    def failing(prompts):
        assert not run.policy.table.any(), "the moving average acts"
        raise MemoryError

    run.method.engine.rollout = failing
    run.tick(0)
    with pytest.raises(MemoryError):
        collect(run)
    assert (run.policy.table == 7.0).all()
    assert not run.method.references["slow"].weights["table"].any()


def test_gradients_reach_the_learner_only(tmp_path):
    changes = {**SLOW, "references": {**SLOW["references"], "ref": "frozen"}, "learn": {"optimizer": "sgd"}}
    run = toy_run(tmp_path, **changes, objective={"penalty": ["k3"]})
    parameter, before = run.policy.table, run.policy.table.detach().clone()
    run.tick(0)
    _, _, batch = learnable(run, collect(run))
    assert set(batch.others) == {"old", "ref"}
    update(run.learner, batch)
    assert run.policy.table is parameter
    assert not torch.equal(parameter, before)
    assert torch.equal(run.method.references["ref"].weights["table"], before)
    torch.testing.assert_close(run.method.references["slow"].weights["table"], 0.25 * parameter.detach())


def test_only_references_that_a_piece_names_are_asked(tmp_path):
    run = toy_run(tmp_path, references={"ref": "frozen"})
    assert run.learner.others == {}


def test_weights_have_the_same_names_on_any_number_of_processes():
    policy = ToyText(num=1, length=1, vocab=2)
    alone = frozen(policy)
    policy.table.data.fill_(2.0)
    policy.module = Wrapped(policy.module)
    assert set(trained(policy)) == {"table"}
    among_many = frozen(policy)
    among_many.load_state_dict(alone.state_dict())
    assert not among_many.weights["table"].any()
    with among_many.rollout_weights():
        assert not policy.table.any()
