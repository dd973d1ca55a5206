"""An update: cuts that do not matter, steps that are taken, and steps that are not."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.core.step_table import StepOutput
from mmrl.core.types import Unit
from mmrl.training.collect import collect
from mmrl.training.loop import evaluate_references, learnable, train, update
from mmrl.training.nonfinite import NotFinite
from tests.support.toys import ToyText, toy_run

DOUBLE = {"name": "tests.support.toys:ToyText", "double": True}
SGD = {"learning_rate": 1.0, "optimizer": "sgd", "max_grad_norm": 0.0}


def ready(folder, **changes):
    """Build a run, collect once, and give what an update learns from."""
    learn = {**SGD, **changes.pop("learn", {})}
    run = toy_run(folder, **{"policy": DOUBLE, "learn": learn, **changes})
    run.tick(0)
    collection = collect(run)
    _, _, batch = learnable(run, collection)
    return run, batch


def moved_by(folder, **changes):
    """Give how the weights move in one pass: with plain descent of rate 1, minus the gradient."""
    run, batch = ready(folder, **changes)
    update(run.learner, batch)
    return run.policy.table.detach().clone()


def drop_all(table):
    return torch.zeros(len(table), dtype=torch.bool)


def drop_first(table):
    """Let nothing be learned from the first row of every group."""
    first = torch.tensor([uid not in table.uids[:i] for i, uid in enumerate(table.uids)])
    return table.replace(learn=table.learn & ~first[:, None])


class Rising:
    """A policy that is asked, and says how often: every answer is higher by 1."""

    def __init__(self) -> None:
        self.asked = []

    def __call__(self, batch, extra=frozenset()):
        self.asked.append((len(batch), extra))
        return StepOutput(torch.full(batch.mask.shape, float(len(self.asked))), {})


def test_a_dropped_row_stays_in_the_divisor_on_request(tmp_path):
    chain = {"advantage": ["total", "group_center", "tests.training.test_loop:drop_first"]}
    means = {
        count: moved_by(
            tmp_path, **chain, objective={"aggregation": {"name": "sequence_mean", "count": count}}
        )
        for count in ("learned", "drawn")
    }
    run, batch = ready(tmp_path, **chain)
    learned, drawn = len(batch), batch.drawn
    size = run.config.rollout
    assert drawn == size.num_prompts * size.num_generations == learned + size.num_prompts
    torch.testing.assert_close(means["drawn"] * drawn, means["learned"] * learned, rtol=1e-6, atol=0)


# ---- cuts


@pytest.mark.parametrize("unit", [Unit.STEP, Unit.ROW])
def test_micro_batches_do_not_change_the_step(tmp_path, unit):
    changes = {
        "policy": {**DOUBLE, "unit": int(unit)},
        "objective": {"aggregation": "step_mean", "penalty": ["k3"]},
        "references": {"ref": "frozen"},
    }
    whole = moved_by(tmp_path, **changes, learn={"micro_batch_steps": 10**6})
    assert whole.abs().max() > 1e-3
    for micro_batch_steps in (1, 4, 9):
        cut = moved_by(tmp_path, **changes, learn={"micro_batch_steps": micro_batch_steps})
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-15)


def test_the_forward_pass_holds_at_most_micro_batch_steps(tmp_path, monkeypatch):
    run, batch = ready(tmp_path, learn={"micro_batch_steps": 9})
    forward, sizes = ToyText.__call__, []

    def watched(policy, micro, extra):
        sizes.append(micro.mask.numel())
        return forward(policy, micro, extra)

    monkeypatch.setattr(ToyText, "__call__", watched)
    update(run.learner, batch)
    # 16 rows of 4 steps: two rows fit into 9 steps, three do not.
    assert sizes == [8] * 8


def test_minibatches_take_a_step_for_every_part_of_whole_groups(tmp_path):
    run, batch = ready(tmp_path, learn={"minibatches": 3}, rollout={"num_prompts": 4})
    before, counted = run.policy.table.detach().clone(), []
    step = run.learner.step_optimizer

    def watched():
        touched = run.policy.table.grad.abs().sum((1, 2)) > 0
        counted.append(touched.nonzero()[:, 0].tolist())
        step()

    run.learner.step_optimizer = watched
    update(run.learner, batch)
    order = list(dict.fromkeys(batch.steps.prompt.tolist()))
    # Four groups in three parts: one, one and two. Groups whose answers tie push nowhere.
    parts = [order[:1], order[1:2], order[2:]]
    assert len(counted) == 3 and run.learner.guard.meter.updates == 3
    assert all(set(seen) <= set(part) for seen, part in zip(counted, parts, strict=True))
    assert sum(map(len, counted)) >= 3
    assert not torch.equal(run.policy.table, before)


def test_each_minibatch_divides_by_its_own_totals(tmp_path):
    # Two groups of equal size in one part, or in two: a mean over half of the rows weighs twice. On-policy
    # and with groups that share no parameter, the sum of the two steps is twice the one step.
    rollout = {"num_prompts": 2, "num_generations": 4}
    one = moved_by(tmp_path, rollout=rollout, objective={"surrogate": "log_likelihood"})
    two = moved_by(
        tmp_path, rollout=rollout, objective={"surrogate": "log_likelihood"}, learn={"minibatches": 2}
    )
    torch.testing.assert_close(two, 2 * one, rtol=0, atol=1e-15)


def test_iterations_pass_over_one_collection_again(tmp_path):
    changes = {"max_steps": 1, "policy": DOUBLE, "objective": {"surrogate": "log_likelihood"}}
    run = toy_run(tmp_path / "a", **changes, learn={**SGD, "num_iterations": 3})
    train(run)
    again, batch = ready(tmp_path / "b", objective={"surrogate": "log_likelihood"})
    for _ in range(3):
        update(again.learner, batch)
    assert torch.equal(run.policy.table, again.policy.table)
    assert run.journal.read()[0]["grad_norm"] == pytest.approx(run.progress.reported["grad_norm"])


# ---- old


def test_old_is_the_current_pass_where_the_weights_do_not_move_in_between(tmp_path):
    _, batch = ready(tmp_path)
    assert set(batch.others) == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"learn": {"num_iterations": 2}},
        {"learn": {"minibatches": 2}},
        {"objective": {"step_weight": ["truncated_importance"]}},
        {"rollout": {"policy": "slow"}, "references": {"slow": {"name": "ema", "decay": 0.9}}},
    ],
    ids=["iterations", "minibatches", "engine", "another policy"],
)
def test_old_is_asked_where_they_do(tmp_path, changes):
    run, batch = ready(tmp_path, **changes)
    with torch.no_grad():
        torch.testing.assert_close(batch.others["old"].logp, run.policy(batch).logp)
    assert not batch.others["old"].logp.requires_grad


def test_old_stays_what_rolled_out_while_the_policy_moves(tmp_path):
    run, batch = ready(tmp_path, learn={"num_iterations": 2, "learning_rate": 5.0})
    before = batch.others["old"].logp.clone()
    update(run.learner, batch)
    assert torch.equal(batch.others["old"].logp, before)
    with torch.no_grad():
        assert (run.policy(batch).logp - before).abs().max() > 0.1


def test_old_is_the_policy_that_rolled_out(tmp_path):
    run = toy_run(
        tmp_path,
        policy=DOUBLE,
        rollout={"policy": "slow"},
        references={"slow": {"name": "ema", "decay": 0.5}},
    )
    run.policy.table.data.normal_(generator=torch.Generator().manual_seed(1))
    run.tick(0)
    _, _, batch = learnable(run, collect(run))
    # The moving average still has its first weights, which are uniform over six tokens.
    steps = batch.mask > 0
    uniform = torch.full_like(batch.others["old"].logp, -math.log(6))
    torch.testing.assert_close(batch.others["old"].logp[steps], uniform[steps])
    noted = batch.notes["logp"].double()
    torch.testing.assert_close(noted[steps], uniform[steps], rtol=0, atol=1e-6)


def test_what_others_say_stands_in_its_rows_however_it_was_cut(tmp_path):
    run, batch = ready(tmp_path)
    one, many = Rising(), Rising()
    evaluate_references({"ref": one}, batch, run.learner.needs, 10**6)
    cut = evaluate_references({"ref": many}, batch, run.learner.needs, 8)
    assert (one.asked, len(many.asked)) == ([(16, frozenset())], 8)
    # Rows stand in order and 8 steps are two rows, so the answers count up in pairs.
    assert cut.others["ref"].logp[:, 0].tolist() == [float(1 + i // 2) for i in range(16)]


def test_the_engine_is_old_where_it_noted_nothing(tmp_path):
    run, batch = ready(tmp_path, objective={"step_weight": ["truncated_importance"]})
    old = batch.others["old"].logp
    noted = batch.notes["logp"].clone()
    noted[0] = math.nan
    needs = run.learner.needs
    engine = (
        evaluate_references(run.learner.others, batch.replace(notes={"logp": noted}), needs, 99)
        .others["engine"]
        .logp
    )
    assert torch.equal(engine[0], old[0])
    steps = batch.mask[1:] > 0
    assert torch.equal(engine[1:][steps], noted[1:][steps].double())
    nowhere = (
        evaluate_references(run.learner.others, batch.replace(notes={}), run.learner.needs, 99)
        .others["engine"]
        .logp
    )
    assert torch.equal(nowhere, old)


# ---- steps


def test_gradients_are_clipped_to_a_norm(tmp_path):
    free = moved_by(tmp_path)
    norm = free.norm()
    assert norm > 0.01
    held = moved_by(tmp_path, learn={"max_grad_norm": 0.01})
    torch.testing.assert_close(held, free * 0.01 / norm, rtol=1e-4, atol=0)
    torch.testing.assert_close(moved_by(tmp_path, learn={"max_grad_norm": 10.0}), free)


def test_the_norm_is_reported_as_it_was_before_clipping(tmp_path):
    run, batch = ready(tmp_path, learn={"max_grad_norm": 0.01})
    update(run.learner, batch)
    assert run.learner.guard.meter.take()["grad_norm"] == pytest.approx(
        float(moved_by(tmp_path).norm()), rel=1e-6
    )


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path):
    run, batch = ready(tmp_path, references={"slow": {"name": "ema", "decay": 0.5}})
    before = run.policy.table.detach().clone()
    spoilt = batch.replace(advantage=torch.full_like(batch.advantage, math.nan))
    with pytest.raises(NotFinite, match="the gradient of step 0 has the norm nan; the step was not taken"):
        update(run.learner, spoilt)
    assert torch.equal(run.policy.table, before)
    assert not run.learner.optimizer.state_dict()["state"]
    assert run.policy.table.grad is None or not run.policy.table.grad.any()
    update(run.learner, batch)
    assert run.policy.table.isfinite().all(), "nothing of it is left in the next step"


def test_a_collection_without_groups_takes_no_step(tmp_path):
    run = toy_run(tmp_path, group_filter=f"{__name__}:drop_all", max_steps=2, learn={"optimizer": "adamw"})
    train(run)
    assert not run.policy.table.any()
    assert not run.learner.optimizer.state_dict()["state"]
    record = run.journal.read()[-1]
    assert record["frac_groups_kept"] == 0.0
    assert "loss" not in record and "reward" in record


def test_an_empty_minibatch_takes_no_step(tmp_path):
    # Two groups of which the filter keeps one, in two parts: the first part is empty.
    run, batch = ready(tmp_path, learn={"minibatches": 2}, rollout={"num_prompts": 2})
    one = batch.select((batch.group == batch.group[0]).nonzero()[:, 0])
    update(run.learner, one)
    assert run.learner.guard.meter.updates == 1


def test_rows_that_are_not_learned_from_cost_no_forward_pass(tmp_path):
    run = toy_run(tmp_path, advantage=["total", "group_normalize", "drop_truncated"])
    run.tick(0)
    collection = collect(run)
    _, credit, batch = learnable(run, collection)
    cut = sum(row.outcomes[-1].tags["finish"] == "length" for row in collection.rollouts)
    assert 0 < cut < 16
    assert (len(credit), len(batch)) == (16, 16 - cut)
    assert batch.mask.sum() == sum(row.length for row in collection.rollouts) - 4 * cut


def test_a_chain_that_ends_with_two_rewards_is_told_to_add_them_up(tmp_path):
    with pytest.raises(ValueError, match="ended with 2 rewards .*; add `total` to combine them"):
        ready(tmp_path, advantage=["group_normalize"])


def test_references_follow_every_step(tmp_path):
    run, batch = ready(tmp_path, references={"slow": {"name": "ema", "decay": 0.75}})
    for _ in range(2):
        update(run.learner, batch)
    first = moved_by(tmp_path)
    # From 0: .25 w1 after the first step, .75 * .25 w1 + .25 w2 after the second.
    expected = 0.75 * 0.25 * first + 0.25 * run.policy.table.detach()
    torch.testing.assert_close(run.method.references["slow"].weights["table"], expected)


def test_schedules_take_their_value_before_a_step(tmp_path):
    rate = {"name": "linear", "start": 1.0, "end": 0.0, "steps": 4}
    run = toy_run(
        tmp_path,
        learn={"learning_rate": rate, "optimizer": "sgd"},
        objective={
            "surrogate": {"name": "clip", "epsilon": {"name": "linear", "start": 0.4, "end": 0.2, "steps": 2}}
        },
    )
    train(run)
    assert [record["learning_rate"] for record in run.journal.read()] == [1.0, 0.75, 0.5]
    # The last of three ticks was at step 2, where the width has arrived.
    assert run.learner.objective.surrogate.options["epsilon"] == pytest.approx(0.2)


def test_every_step_draws_anew(tmp_path):
    run = toy_run(tmp_path, data={"name": "tests.support.toys:prompts", "num": 1}, rollout={"num_prompts": 1})
    texts = []
    for step in range(2):
        run.tick(step)
        texts.append([row.outcomes[0].text for row in collect(run).rollouts])
    assert texts[0] != texts[1]
    run.tick(1)
    assert [row.outcomes[0].text for row in collect(run).rollouts] == texts[1]


def test_clocks_carry_the_metrics_of_the_last_report(tmp_path):
    seen = []

    class Watching:
        def __call__(self, clock):
            seen.append((clock.step, clock.metrics.get("reward")))
            return 0.1

    run = toy_run(tmp_path, policy=DOUBLE)
    run.learner.learning_rate = Watching()
    train(run)
    rewards = [record["reward"] for record in run.journal.read()]
    assert seen == [(0, None), (1, rewards[0]), (2, rewards[1])]


def test_other_policies_are_asked_as_often_on_every_process(tmp_path):
    # Where another process has more cuts, the last one is asked about again, and its answer does not count.
    run = toy_run(tmp_path, references={"ref": "frozen"}, objective={"penalty": ["k3"]})
    run.tick(0)
    _, _, batch = learnable(run, collect(run))
    asked = []

    def counting(batch, extra):
        asked.append(len(batch.mask))
        return run.policy(batch, extra)

    def even(cuts):
        return [*((cut, 1.0, False) for cut in cuts), (cuts[-1], 0.0, False), (cuts[-1], 0.0, True)]

    alone = evaluate_references({"ref": run.policy}, batch, run.learner.needs, 8).others["ref"].logp
    found = evaluate_references({"ref": counting}, batch, run.learner.needs, 8, even).others["ref"].logp
    assert len(asked) == len(list(batch.cuts(8, Unit.STEP))) + 2
    assert torch.equal(found, alone)


def test_a_step_reports_its_micro_batches(tmp_path):
    run = toy_run(tmp_path, max_steps=1)
    seen = []
    run.report.console.work = lambda *told: seen.append(told)
    train(run)
    learned = [told for told in seen if told[0] == "learning, micro-batches"]
    assert learned and learned[0][1] == 0 and all(done < total for _, done, total in learned)
