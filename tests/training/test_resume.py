"""A run that was stopped goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.cli import main
from mmrl.reporting import html
from mmrl.reporting.metrics import of_training
from mmrl.runtime import checkpoint
from mmrl.training.checkpointing import resume
from tests.support.fork_server import command, server
from tests.support.killing import PLANS, REMEMBERING, RUNS, differences
from tests.support.remembering import MOSTLY
from tests.support.resuming import EVERYTHING, Killed, assert_alike, killed, resumed, without_times
from tests.support.toys import ToyGenerate, plan, toy_run

pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "write_page", lambda folder: folder)
        return resumed(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("at", [1, 3, 5, 6])
def test_a_killed_run_goes_on_exactly(tmp_path, uninterrupted, at):
    # Checkpoints stand behind steps 2, 5 and 6; at 1 there is none, at 5 the second is not written.
    killed(tmp_path, at=at)
    assert_alike(resumed(tmp_path), uninterrupted)


def test_killed_twice_and_at_the_same_place(tmp_path, uninterrupted):
    for _ in range(2):
        killed(tmp_path, at=4)
    assert_alike(resumed(tmp_path), uninterrupted)


def test_what_has_a_memory_is_taken_up(tmp_path):
    killed(tmp_path, at=4)
    run = toy_run(tmp_path, **EVERYTHING)
    fresh = toy_run(tmp_path / "fresh", **EVERYTHING)
    assert resume(run) == 3
    state = checkpoint.read_state(tmp_path / "checkpoint-3")
    assert run.method.sampler.drawn == state["pieces"]["sampler[0]"]["drawn"] >= 9
    assert torch.equal(
        run.method.references["slow"].weights["table"], state["references"]["slow"]["weights"]["table"]
    )
    assert not torch.equal(run.method.references["slow"].weights["table"], run.policy.table)
    assert not run.method.references["ref"].weights["table"].any(), "the weights of the very beginning"
    assert run.observers[0].count == state["pieces"]["advantage[1]"]["count"] > 0
    assert run.progress.reported["reward"] == state["reported"]["reward"]
    # 3 steps of 2 iterations over 2 minibatches, each with an optimizer step unless the filter took it all.
    assert 6 <= run.learner.optimizer.state_dict()["state"][0]["step"] <= 12
    assert fresh.method.sampler.drawn == fresh.observers[0].count == 0


def test_a_finished_run_that_is_given_more_steps_goes_on(tmp_path, uninterrupted):
    resumed(tmp_path, max_steps=4)
    run = resumed(tmp_path)
    (tmp_path / "predictions" / "step-000004.parquet").unlink()  # of what was the last step at first
    assert_alike(run, uninterrupted)


def test_a_finished_run_stays_as_it_is(tmp_path):
    first = resumed(tmp_path, max_steps=2)
    again = resumed(tmp_path, max_steps=2)
    assert torch.equal(again.policy.table, first.policy.table)
    assert [record["step"] for record in again.journal.read()] == [0, 0, 1]  # the first one is of the start


def test_a_run_killed_before_it_removed_older_checkpoints_removes_them(tmp_path, monkeypatch):
    changes = {"max_steps": 4, "save_steps": 1, "save_total_limit": 2}

    def dying(folder, limit, step, keep, warn):
        if step == 4:
            raise Killed

    monkeypatch.setattr(checkpoint, "prune", dying)
    with pytest.raises(Killed):
        resumed(tmp_path, **changes)
    monkeypatch.undo()
    resumed(tmp_path, **changes)
    assert [folder.name for folder in checkpoint.checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-3"]


def test_a_process_that_is_killed_outright_goes_on_exactly(tmp_path, capsys):
    changes = {"max_steps": 100_000, "save_steps": 2}
    plan_file = tmp_path / "plan.yaml"
    plan_file.write_text(json.dumps(plan(tmp_path / "run", **{**EVERYTHING, **changes})))
    process = command("train", str(plan_file))
    try:
        until = time.monotonic() + 600
        while len(checkpoint.checkpoints(tmp_path / "run")) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        journal = (tmp_path / "run" / "metrics.jsonl").read_text()
        assert main(["train", str(plan_file)]) == 2
        held = f"run' is in use by process {process.pid} on "
        assert held in capsys.readouterr().err
        assert (tmp_path / "run" / "metrics.jsonl").read_text().startswith(journal)
    finally:
        process.kill()
        process.communicate(timeout=600)
    reached = checkpoint.step_of(checkpoint.checkpoints(tmp_path / "run")[0])
    steps = {"max_steps": reached + 3, "save_steps": 2}
    assert_alike(resumed(tmp_path / "run", **steps), resumed(tmp_path / "whole", **steps))


def test_what_killed_runs_differ_in_is_named(tmp_path, uninterrupted):
    other = tmp_path / "other"
    shutil.copytree(uninterrupted.folder, other)
    assert differences(uninterrupted.folder, other) == []
    state = checkpoint.read_state(other / "checkpoint-7")
    model = other / "checkpoint-7" / "model" / "model.safetensors"
    save_file({"table": load_file(model)["table"] + 1e-5}, model)
    checkpoint.write_state(other / "checkpoint-7", state)
    journal = other / "metrics.jsonl"
    journal.write_text(journal.read_text().replace('"reward": ', '"reward": 1', 1))
    assert differences(uninterrupted.folder, other) == ["checkpoint-7/model/model.safetensors", journal.name]
    (other / "checkpoint-5.tmp").mkdir()
    assert differences(uninterrupted.folder, other) == ["which files there are (checkpoint-5.tmp)"]


# The other samplers keep their memory in the same ways: `tests/samplers/test_resume.py` compares each.
SOME = [
    *(f"sampler {name}" for name in (*MOSTLY, "vision.difficulty_augmentation")),
    *(name for name in REMEMBERING if name.startswith("engine ")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "names", "kills"), [("usual", PLANS, 1), ("remembering", SOME, 2)], ids=RUNS
)
def test_runs_that_are_killed_at_random_instants_end_as_if_nothing_had_happened(tmp_path, runs, names, kills):
    options = ["--folder", str(tmp_path), "--kills", str(kills * len(names)), "--steps", "4", "--runs", runs]
    process = server(0).fork("tests.support.killing", [*options, "--only", *names], os.environ)
    printed, _ = process.communicate(timeout=900)
    assert process.returncode == 0, printed
    told = [line for line in printed.splitlines() if " kills of " in line or line.startswith("no runs")]
    assert [line.partition(" kills")[0] for line in told] == [
        *(f"{name}: {kills}" for name in names),
        "no runs ended otherwise than one that nobody killed",
    ]


class LossyGenerate(ToyGenerate):
    """An engine that is cheaper on purpose: what it notes of log-probabilities is off by 1/2."""

    def __init__(self, policy, *, stream, transform):
        super().__init__(policy, stream=stream)

    def rollout(self, prompts):
        rows = super().rollout(prompts)
        return tuple(replace(row, notes={**row.notes, "logp": row.notes["logp"] - 0.5}) for row in rows)


HEARD = []


def listens(records):
    """An alarm that remembers what it was given, without times."""
    HEARD.append(str(without_times(records)))
    return []


def test_warnings_hear_after_a_resume_what_they_would_have_heard(tmp_path):
    lossy = {"name": "tests.training.test_resume:LossyGenerate", "transform": "compression.div_prune"}
    changes = {
        "rollout": {"engine": [lossy]},
        "report": {"trackers": [], "checks": ["logprob_mismatch", "tests.training.test_resume:listens"]},
        "max_steps": 4,
    }
    HEARD.clear()
    whole = resumed(tmp_path / "whole", **changes)
    wanted = list(HEARD)
    assert len(wanted) == 5 and not [text for text in whole.report.raised if "the ratio is not 1" in text]
    assert of_training(whole.report.records)[0]["sampling/sampling_logp_difference/mean"] > 0.1
    killed(tmp_path / "run", at=3, **changes)
    HEARD.clear()
    run = resumed(tmp_path / "run", **changes)
    assert wanted[3:] == HEARD
    assert run.report.raised == whole.report.raised
