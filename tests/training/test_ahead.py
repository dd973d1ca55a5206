"""Rollouts that are asked for one step ahead: a lag of one step, exactly, also where a run is resumed."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.types import VERSION, Trajectory
from mmrl.costs import operations
from mmrl.reporting.metrics import describe_ages, noted_ages
from mmrl.runtime.requests import taken
from mmrl.training.ahead import prefetch
from mmrl.training.loop import evaluate_references, train
from tests.support.resuming import EVERYTHING, assert_alike, killed, resumed, without_times
from tests.support.toys import STOP, ToyGenerate, ToyRow, prompts, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

HERE = __name__
CORRECTED = {"objective": {"step_weight": ["truncated_importance"]}}


class Beginning(ToyGenerate):
    """Answer when it is asked, and hand the answers over when they are collected."""

    def __init__(self, policy, *, stream, power: float = 1.0):
        super().__init__(policy, stream=stream)
        self.begun, self.power = deque(), power

    def ask(self, prompts):
        rows = super().rollout(prompts)
        rows = [replace(r, notes={**r.notes, "power": torch.full((r.length,), self.power)}) for r in rows]
        self.begun.append((self.stream.step, list(prompts), tuple(rows)))

    def rollout(self, prompts):
        return taken(self.begun, self.stream.step, prompts, self.ask)[2]


class Lagging(ToyGenerate):
    """Answer with older weights: what asking ahead is, written down without it."""

    def __init__(self, policy, *, stream, lag: int = 1):
        super().__init__(policy, stream=stream)
        self.lag, self.before = lag, []

    @torch.no_grad()
    def rollout(self, prompts):
        now = self.policy.table.clone()
        self.before.append(now)
        self.policy.table.copy_(self.before[max(0, self.stream.step - self.lag)])
        rows = super().rollout(prompts)
        self.policy.table.copy_(now)
        return rows


def ahead(engine=f"{HERE}:Beginning", lag=1, **changes):
    rollout = {"engine": [engine], "max_staleness": lag}
    return {**CORRECTED, "rollout": rollout, "max_steps": 5, **changes}


def test_requests_whose_prompts_were_left_out_since_are_dropped():
    first, second = prompts()[:2]
    pending = deque([(1, [first, second], "a"), (2, [first], "b"), (3, [first], "c")])
    ask = lambda listed: pending.append((1, listed, "new"))
    assert taken(pending, 1, [first], ask)[2] == "new" and len(pending) == 3
    assert taken(pending, 2, [first], ask)[2] == "b" and [kept for *_, kept in pending] == ["c"]


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_it_is_a_lag_of_whole_steps(tmp_path, lag):
    run = toy_run(tmp_path / "ahead", **ahead(lag=lag, max_steps=7))
    train(run)
    engine = {"name": f"{HERE}:Lagging", "lag": lag}
    wanted = toy_run(tmp_path / "lagging", **CORRECTED, max_steps=7, rollout={"engine": [engine]})
    train(wanted)
    assert torch.equal(run.policy.table, wanted.policy.table)
    steps, others = without_times(run.journal.read()), without_times(wanted.journal.read())
    lags = [step["sampling/kl"] for step in steps]
    # The second step asks about other prompts, of which the table has learned nothing yet.
    assert lags[:2] == [0, 0] and all(lag > 1e-4 for lag in lags[2:])
    for name in ("reward", "loss", "sampling/kl"):
        assert [step[name] for step in steps] == [step[name] for step in others]
    for name in ("sampling/age/mean", "sampling/age/max"):
        assert [step[name] for step in steps] == [min(step, lag) for step in range(7)]
    assert [step["sampling/age/older_share"] for step in steps] == [0, *[1] * 6]
    exact = toy_run(tmp_path / "exact", **CORRECTED, max_steps=7)
    train(exact)
    assert not torch.equal(run.policy.table, exact.policy.table)
    assert "sampling/age/mean" not in exact.journal.read()[0]


@pytest.mark.parametrize(("lag", "at"), [(1, 0), (1, 3), (2, 2), (4, 1), (4, 3)])
def test_a_run_that_is_killed_with_rollouts_in_flight_goes_on_exactly(tmp_path, lag, at):
    # Notes show the value of a scheduled option at the request, which a resume must restore.
    power = {"name": "linear", "start": 0.5, "end": 3.0, "steps": 4}
    engine = {"name": f"{HERE}:Beginning", "power": power}
    changes = ahead(engine, lag, save_steps=1, max_steps=6)
    whole = resumed(tmp_path / "whole", **changes)
    killed(tmp_path / "killed", at=at, **changes)
    again = toy_run(tmp_path / "killed", **{**EVERYTHING, **changes})
    powers, rollout = [], again.method.engine.rollout
    again.method.engine.rollout = lambda prompts: note(rollout(prompts), powers)
    train(again)
    assert_alike(again, whole)
    assert powers == [pytest.approx(0.5 + 2.5 * min(4, max(0, step - lag)) / 4) for step in range(at, 6)]


def note(rows, powers):
    powers.append(float(rows[0].notes["power"][0]))
    return rows


def test_older_rollouts_are_corrected_by_default(tmp_path):
    rollout = {"engine": [f"{HERE}:Beginning"], "max_staleness": 2}
    weights = lambda **changes: toy_run(tmp_path, **changes).learner.objective.step_weight
    (default,) = weights(rollout=rollout)
    assert default.entry.name == "truncated_importance" and default.options == {}
    assert weights(rollout=rollout, objective={"step_weight": []}) == ()
    assert weights(rollout=rollout, objective={"ratio": {"name": "step_ratio", "against": "engine"}}) == ()
    assert weights() == ()


def test_a_token_weighs_its_probability_now_over_that_of_the_weights_that_sampled_it(tmp_path):
    run = toy_run(tmp_path, **ahead(lag=2, objective={}))
    # Now every token has 1/6. Version 0 gave the first 1/12, version 1 gave the others 1/3 and 1/60.
    notes = {"logp": torch.tensor([1 / 12, 1 / 3, 1 / 60]).log(), VERSION: torch.tensor([0.0, 1.0, 1.0])}
    row = Trajectory(prompts()[0], "p0", (), ToyRow(0, torch.tensor([1, 2, STOP])), 3, notes)
    batch = evaluate_references(
        {"old": run.policy}, run.policy.collate((row,)), run.learner.needs, micro_batch_steps=9
    )
    (correction,) = run.learner.objective.step_weight
    # 12/6, 3/6, and 60/6 truncated to 3.
    assert correction(batch).tolist() == [pytest.approx([2.0, 0.5, 3.0])]
    # Of the tokens, one is two steps old, and two are one step old: 4/3 on average.
    found = describe_ages([noted_ages((row,), step=2)])
    assert [*found.values()] == [pytest.approx(4 / 3), 2.0, 1.0]
    assert [*describe_ages([noted_ages((row,), 1), noted_ages((), 1)]).values()] == [
        pytest.approx(1 / 3),
        1.0,
        pytest.approx(1 / 3),
    ]


def test_what_cannot_be_asked_ahead_is_refused(tmp_path):
    rounds = {"engine": [f"{HERE}:Beginning"], "max_staleness": 1, "max_rounds": 2}
    with pytest.raises(ConfigError, match="only one round can be asked for ahead"):
        toy_run(tmp_path, **CORRECTED, rollout=rounds)
    with pytest.raises(ConfigError, match="cannot work while the policy learns; list `ray_workers` last"):
        toy_run(tmp_path, **CORRECTED, rollout={"max_staleness": 1})
    with pytest.raises(ConfigError, match="max_staleness"):
        toy_run(tmp_path, **ahead(lag=-1))
    pairwise = {"name": "comparison", "implicit_reward": "log_ratio", "compare": ["sigmoid"]}
    with pytest.raises(ConfigError, match="is 2, so answers come from older weights, but the objective"):
        toy_run(tmp_path, **{**ahead(lag=2), "objective": pairwise, "references": {"ref": "frozen"}})


def test_operations_of_other_processes_are_not_counted_as_none(tmp_path):
    run = toy_run(tmp_path, **ahead())
    with pytest.raises(ConfigError, match="counts what this process computes"), operations(run.method.engine):
        pass


def test_prompts_that_a_sampler_changed_are_an_error(tmp_path):
    run = toy_run(tmp_path, **ahead())
    draw = run.method.sampler.draw
    run.method.sampler.draw = lambda *sizes: [replace(p, tags={"hint": "1"}) for p in draw(*sizes)]
    with pytest.raises(ValueError, match=r"changed the prompt 'p\d', which cannot be asked ahead"):
        train(run)


@pytest.mark.parametrize("rank, tensors", [(0, 1), (1, 0)])
def test_only_the_process_that_saves_copies_the_weights_of_what_is_in_flight(rank, tensors, tmp_path):
    run = toy_run(tmp_path, **ahead())
    run.processes.rank = rank
    prefetch(run)
    assert len(run.ahead[0].weights) == tensors
