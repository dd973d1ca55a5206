"""Rollouts that are asked for one step ahead: a lag of one step, exactly, also where a run is resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.costs import operations
from mmrl.training.ahead import prefetch
from mmrl.training.loop import train
from tests.support.resuming import assert_alike, killed, resumed, without_times
from tests.support.toys import ToyGenerate, toy_run

HERE = __name__
CORRECTED = {"objective": {"step_weight": ["truncated_importance"]}}


class Beginning(ToyGenerate):
    """Answer when it is asked, and hand the answers over when they are collected."""

    begun = None

    def ask(self, prompts):
        self.begun = list(prompts), super().rollout(prompts)

    def rollout(self, prompts):
        begun, self.begun = self.begun, None
        if begun is None:
            return super().rollout(prompts)
        assert list(prompts) == begun[0]
        return begun[1]


class Lagging(ToyGenerate):
    """Answer with the weights of the step before: what asking ahead is, written down without it."""

    before = None

    @torch.no_grad()
    def rollout(self, prompts):
        now = self.policy.table.clone()
        self.policy.table.copy_(now if self.before is None else self.before)
        rows = super().rollout(prompts)
        self.policy.table.copy_(now)
        self.before = now
        return rows


def ahead(engine=f"{HERE}:Beginning", **changes):
    return {**CORRECTED, "rollout": {"engine": [engine], "max_staleness": 1}, "max_steps": 5, **changes}


def test_it_is_a_lag_of_one_step(tmp_path):
    run = toy_run(tmp_path / "ahead", **ahead())
    train(run)
    wanted = toy_run(tmp_path / "lagging", **CORRECTED, max_steps=5, rollout={"engine": [f"{HERE}:Lagging"]})
    train(wanted)
    assert torch.equal(run.policy.table, wanted.policy.table)
    steps, others = without_times(run.journal.read()), without_times(wanted.journal.read())
    lags = [step["sampling/kl"] for step in steps]
    # The second step asks about other prompts, of which the table has learned nothing yet.
    assert lags[:2] == [0, 0] and all(lag > 1e-4 for lag in lags[2:])
    for name in ("reward", "loss", "sampling/kl"):
        assert [step[name] for step in steps] == [step[name] for step in others]
    exact = toy_run(tmp_path / "exact", **CORRECTED, max_steps=5)
    train(exact)
    assert not torch.equal(run.policy.table, exact.policy.table)


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_run_that_is_killed_with_rollouts_in_flight_goes_on_exactly(tmp_path, at):
    changes = ahead(save_steps=1)
    whole = resumed(tmp_path / "whole", **changes)
    killed(tmp_path / "killed", at=at, **changes)
    again = resumed(tmp_path / "killed", **changes)
    assert_alike(again, whole)


def test_what_cannot_be_asked_ahead_is_refused(tmp_path):
    rounds = {"engine": [f"{HERE}:Beginning"], "max_staleness": 1, "max_rounds": 2}
    with pytest.raises(ConfigError, match="only one round can be asked for a step ahead"):
        toy_run(tmp_path, **CORRECTED, rollout=rounds)
    with pytest.raises(ConfigError, match="cannot work while the policy learns; list `ray_workers` last"):
        toy_run(tmp_path, **CORRECTED, rollout={"max_staleness": 1})
    with pytest.raises(ConfigError, match=r"add `step_weight: \[truncated_importance\]`"):
        toy_run(tmp_path, rollout={"engine": [f"{HERE}:Beginning"], "max_staleness": 1})
    with pytest.raises(ConfigError, match="max_staleness"):
        toy_run(tmp_path, **ahead(rollout={"max_staleness": 2}))


def test_operations_of_other_processes_are_not_counted_as_none(tmp_path):
    run = toy_run(tmp_path, **ahead())
    with pytest.raises(ConfigError, match="counts what this process computes"), operations(run.method.engine):
        pass


def test_prompts_that_a_sampler_changed_are_an_error(tmp_path):
    run = toy_run(tmp_path, **ahead())
    draw = run.method.sampler.draw
    run.method.sampler.draw = lambda *sizes: [replace(p, tags={"hint": "1"}) for p in draw(*sizes)]
    with pytest.raises(ValueError, match=r"changed the prompt 'p\d', which cannot be asked a step ahead"):
        train(run)


@pytest.mark.parametrize("rank, tensors", [(0, 1), (1, 0)])
def test_only_the_process_that_saves_copies_the_weights_of_what_is_in_flight(rank, tensors, tmp_path):
    run = toy_run(tmp_path, **ahead())
    run.processes.rank = rank
    assert len(prefetch(run, 1, run.pieces.clock).weights) == tensors
