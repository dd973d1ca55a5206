"""A run that is resumed with another configuration, epochs beside steps, and weights to begin with."""

from __future__ import annotations

import pytest
import torch

from mmrl.build import build, with_steps
from mmrl.config.changes import differences, inside
from mmrl.config.schema import Config, ConfigError, load, parse
from mmrl.core.types import Clock
from mmrl.reporting.metrics import Journal
from mmrl.runtime import checkpoint
from mmrl.runtime.checkpoint import CheckpointError
from mmrl.schedules import cosine, linear
from mmrl.training.checkpointing import check_output_folder
from mmrl.training.loop import train
from tests.support.resuming import killed, resumed
from tests.support.toys import plan, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

COSINE = {"name": "cosine", "start": 0.1, "end": 0.0}
EVALUATION = {"data": {"name": "tests.support.toys:prompts", "num": 2}}


def trained(folder, **changes):
    run = toy_run(folder, **changes)
    train(run)
    return run


# ---- what may change


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("rate", {"learn": {"learning_rate": 0.02}}, "learn.learning_rate"),
        ("schedule", {"learn": {"learning_rate": COSINE}}, "learn.learning_rate"),
        ("memory", {"learn": {"micro_batch_steps": 7}}, "learn.micro_batch_steps"),
        ("evaluation", {"evaluation": EVALUATION, "eval_steps": 1}, "evaluation.data"),
        ("report", {"report": {"logging_steps": 2}}, "report.logging_steps"),
        ("saving", {"save_steps": 1}, "save_steps"),
    ],
)
def test_a_key_that_may_change_is_written_down_and_holds_from_then_on(tmp_path, name, changes, key):
    trained(tmp_path, max_steps=2)
    run = trained(tmp_path, max_steps=4, **changes)
    records = {record["key"]: record for record in Journal(tmp_path, "changes.jsonl").read()}
    assert records.keys() >= {key, "max_steps"} and records[key]["step"] == 2
    assert (records["max_steps"]["old"], records["max_steps"]["new"]) == (2, 4)
    assert load(tmp_path / "config.yaml") == run.config, "rewritten"
    assert run.learner.guard.micro_batch_steps == run.config.learn.micro_batch_steps
    # A cosine from 0.1 to 0 over the 4 steps of the run: 0.05 (1 + cos(3 pi / 4)) at the last one.
    rates = {"rate": 0.02, "schedule": 0.05 * (1 - 0.5**0.5)}
    assert run.learner.optimizer.param_groups[0]["lr"] == pytest.approx(rates.get(name, 0.1))
    trained(tmp_path, max_steps=4, **changes)
    assert len(Journal(tmp_path, "changes.jsonl").read()) == len(records), "nothing changed since"


def test_a_schedule_with_a_memory_may_come_and_go(tmp_path):
    follows = {"name": "running_mean", "metrics": ["reward"], "start": 0.1}
    trained(tmp_path, max_steps=2, learn={"learning_rate": follows})
    trained(tmp_path, max_steps=3, learn={"learning_rate": 0.1})
    run = trained(tmp_path, max_steps=4, learn={"learning_rate": {**follows, "start": 0.05}})
    assert run.progress.step == 4


def test_another_evaluation_begins_a_new_choice_of_the_best(tmp_path):
    chosen = {"eval_steps": 1, "save_steps": 1, "metric_for_best_model": "eval_brevity"}
    first = trained(tmp_path, max_steps=2, evaluation=EVALUATION, **chosen)
    first.progress.best.value = 99.0
    other = {"data": {"name": "tests.support.toys:prompts", "num": 3}}
    run = trained(tmp_path, max_steps=3, evaluation=other, **chosen)
    assert run.progress.best.step == 3


def test_what_must_not_change_is_named_with_both_values_and_what_to_do(tmp_path):
    trained(tmp_path, max_steps=1)
    other = parse(plan(tmp_path, seed=1, rollout={"num_prompts": 2}, learn={"learning_rate": 9.0}), Config)
    with pytest.raises(ConfigError) as raised:
        check_output_folder(other)
    text = str(raised.value)
    assert "rollout.num_prompts is 4 there and 2 here" in text and "seed is 0 there and 1 here" in text
    assert "learning_rate" not in text, "that may change"
    assert f"another output_dir, with init_from={tmp_path}" in text


def test_a_run_that_failed_before_its_first_step_does_not_block_its_folder(tmp_path):
    run = toy_run(tmp_path)
    run.advantage = lambda table: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(run)
    assert (tmp_path / "config.yaml").exists()
    other = trained(tmp_path, seed=1, max_steps=1)
    assert load(tmp_path / "config.yaml") == other.config
    assert not (tmp_path / "changes.jsonl").exists()


def test_a_run_killed_after_its_first_step_keeps_its_folder(tmp_path):
    killed(tmp_path, at=1)
    with pytest.raises(ConfigError, match="seed is 0 there and 1 here"):
        resumed(tmp_path, seed=1)


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, ["b.c"]),
        ({"a": ["x", "y"]}, {"a": ["x", {"name": "y", "w": 2}]}, ["a.1.w"]),
        ({"a": ["x"]}, {"a": ["x", "y"]}, ["a"]),
        ({"a": {"name": "p", "x": 1}}, {"a": {"name": "q", "x": 2}}, ["a"]),
        ({"a": 1}, {"a": 1, "b": 0}, ["b"]),
        ({"a": {}}, {"a": {}}, []),
    ],
)
def test_differences_are_dotted_keys(old, new, keys):
    assert list(differences(old, new)) == keys


def test_a_key_is_inside_what_stands_above_it():
    assert inside("report.checks[0]", "report") and inside("report", "report")
    assert not inside("reporting", "report")


# ---- epochs


def test_epochs_become_steps_when_the_data_are_read(tmp_path):
    config = parse(plan(tmp_path, num_train_epochs=1.5), Config)  # 8 prompts, 4 a step: 3 steps
    run = build(config, quiet=True)
    assert (run.config.max_steps, run.config.num_train_epochs) == (3, 0.0)
    train(run)
    assert load(tmp_path / "config.yaml").max_steps == 3
    check_output_folder(config)  # the same command goes on


@pytest.mark.parametrize(
    ("epochs", "rows", "prompts", "steps"),
    [(1, 8, 4, 2), (1, 9, 4, 3), (0.1, 8, 4, 1), (3, 10, 100, 3), (0.3, 100, 10, 3), (2.5, 10, 4, 7)],
)
def test_steps_of_epochs_are_rounded_up(epochs, rows, prompts, steps):
    config = parse(plan("x", num_train_epochs=epochs, rollout={"num_prompts": prompts}), Config)
    assert with_steps(config, rows).max_steps == steps


def test_shares_of_a_run_become_steps():
    # 1.5 passes over 8 prompts, 2 a step: 6 steps
    shares = {"save_steps": 0.5, "eval_steps": 0.3}
    config = parse(plan("x", num_train_epochs=1.5, rollout={"num_prompts": 2}, **shares), Config)
    whole = with_steps(config, 8)
    assert (whole.max_steps, whole.save_steps, whole.eval_steps) == (6, 3, 2)
    whole = with_steps(parse(plan("x", max_steps=10, save_steps=0.25), Config), 8)
    assert (whole.max_steps, whole.save_steps, whole.eval_steps) == (10, 3, 0)


def test_a_run_that_saves_at_its_end_alone(tmp_path):
    train(toy_run(tmp_path, max_steps=3, save_steps=0))
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_steps_and_epochs_together_are_an_error_that_names_both():
    with pytest.raises(ConfigError, match="'max_steps' is 3 and 'num_train_epochs' is 2; leave one out"):
        load(plan("x"), ["num_train_epochs=2"])
    assert load(plan("x"), ["num_train_epochs=2", "max_steps=null"]).num_train_epochs == 2


def test_a_schedule_without_steps_is_as_long_as_the_run(tmp_path):
    # Steps 0 to 3 of 4: 1 - i / 4.
    run = trained(
        tmp_path, max_steps=4, learn={"learning_rate": {"name": "linear", "start": 1.0, "end": 0.0}}
    )
    assert [record["learning_rate"] for record in run.journal.read()] == [1.0, 0.75, 0.5, 0.25]
    assert cosine(Clock(5, max_steps=10), start=1.0, end=0.0) == pytest.approx(0.5)
    assert linear(Clock(5, max_steps=10), start=1.0, end=0.0, steps=5) == 0.0


# ---- weights to begin with


@pytest.mark.parametrize("part", ["", "checkpoint-3", "checkpoint-3/model"])
def test_a_run_begins_from_the_weights_of_another(tmp_path, part):
    first = trained(tmp_path / "first")
    run = toy_run(
        tmp_path / "second",
        init_from=str(tmp_path / "first" / part),
        references={"ref": "frozen", "slow": {"name": "ema", "decay": 0.5}},
        max_steps=1,
    )
    seen = {}

    def remember(step):
        seen["table"] = run.policy.table.detach().clone()
        seen["slow"] = run.method.references["slow"].weights["table"].clone()
        type(run).tick(run, step)

    run.tick = remember
    train(run)
    assert torch.equal(seen["table"], first.policy.table) and torch.equal(seen["slow"], first.policy.table)
    assert not run.method.references["ref"].weights["table"].any(), "frozen is policy.model, which is zeros"
    assert first.policy.table.any()


def test_a_run_that_goes_on_does_not_begin_again(tmp_path):
    trained(tmp_path / "first")
    start = {"init_from": str(tmp_path / "first")}
    whole = trained(tmp_path / "whole", max_steps=4, **start)
    trained(tmp_path / "run", max_steps=2, **start)
    assert torch.equal(trained(tmp_path / "run", max_steps=4, **start).policy.table, whole.policy.table)


def test_weights_that_do_not_fit_or_are_not_there_are_named(tmp_path):
    trained(tmp_path / "first", policy={"name": "tests.support.toys:ToyText", "length": 2})
    with pytest.raises(CheckpointError, match="do not fit the policy: RuntimeError"):
        trained(tmp_path / "second", init_from=str(tmp_path / "first"))
    with pytest.raises(ConfigError, match="'init_from' is '/nowhere', which is no folder"):
        check_output_folder(parse(plan(tmp_path / "third", init_from="/nowhere"), Config))
    with pytest.raises(ConfigError, match="overwrite_output_dir=true empties"):
        check_output_folder(
            parse(
                plan(tmp_path / "first", init_from=str(tmp_path / "first"), overwrite_output_dir=True), Config
            )
        )
    assert checkpoint.checkpoints(tmp_path / "first")
