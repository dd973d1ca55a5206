"""A run that was stopped goes on as if nothing had happened."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from safetensors import SafetensorError
from safetensors.torch import load_file

from mmrl import checkpoint, page
from mmrl.__main__ import main
from mmrl.config import ConfigError
from mmrl.files import LOCK, locked
from mmrl.train import train
from tests.toys import ToyText, plan, toy_run

EVERYTHING = {
    "rollout": {"num_prompts": 3, "num_generations": 3, "max_rounds": 2, "policy": "slow"},
    "group_filter": "varied",
    "advantage": ["total", "tests.toys:RunningMean", "group_normalize"],
    "objective": {"penalty": ["k3"], "surrogate": {"name": "clip", "epsilon": 0.2}},
    "references": {"ref": "frozen", "slow": {"name": "ema", "decay": 0.5}},
    "learn": {
        "learning_rate": {"name": "cosine", "start": 0.3, "end": 0.0, "steps": 8},
        "num_iterations": 2,
        "minibatches": 2,
    },
    "evaluation": {"data": {"name": "tests.toys:prompts", "num": 2}},
    "eval_steps": 3,
    "max_steps": 7,
    "save_steps": 3,
}


class Killed(BaseException):
    """The end of a process, at a bad moment."""


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(page, "curves", lambda runs: [])


def killed(folder, *, at: int, **changes):
    """Train until the end of a step, and fall over before it is reported."""
    run = toy_run(folder, **{**EVERYTHING, **changes})
    finish = run.finish

    def dying(step, collection, credit):
        if step == at:
            raise Killed
        finish(step, collection, credit)

    run.finish = dying
    with pytest.raises(Killed):
        train(run)


def resumed(folder, **changes):
    run = toy_run(folder, **{**EVERYTHING, **changes})
    train(run)
    return run


def untimed(run):
    """Read the journal without times."""
    return [
        {name: value for name, value in record.items() if "time" not in name and "seconds" not in name}
        for record in run.journal.read()
    ]


def assert_alike(found, expected):
    """Compare two finished runs bit for bit."""
    assert torch.equal(found.policy.table, expected.policy.table)
    assert untimed(found) == untimed(expected)
    names = [path.name for path in sorted((expected.folder / "completions").iterdir())]
    assert [path.name for path in sorted((found.folder / "completions").iterdir())] == names
    for name in names:
        tables = [parquet.read_table(run.folder / "completions" / name) for run in (found, expected)]
        assert tables[0].equals(tables[1]), name
    last, wanted = (checkpoint.checkpoints(run.folder)[0] for run in (found, expected))
    assert last.name == wanted.name
    tensors = [load_file(folder / checkpoint.TENSORS) for folder in (last, wanted)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[1])
    pieces = [checkpoint.read_state(folder)["pieces"] for folder in (last, wanted)]
    assert pieces[0]["sampler"] == pieces[1]["sampler"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "curves", lambda runs: [])
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
    assert run.resume() == 3
    state = checkpoint.read_state(tmp_path / "checkpoint-3")
    assert run.sampler.drawn == state["pieces"]["sampler"]["drawn"] >= 9
    assert torch.equal(
        run.references["slow"].weights["table"], state["references"]["slow"]["weights"]["table"]
    )
    assert not torch.equal(run.references["slow"].weights["table"], run.policy.table)
    assert not run.references["ref"].weights["table"].any(), "the weights of the very beginning"
    assert run.observers[0].count == state["pieces"]["advantage[1]"]["count"] > 0
    assert run.reported["reward"] == state["reported"]["reward"]
    # 3 steps of 2 iterations over 2 minibatches, each with an optimizer step unless the filter took it all.
    assert 6 <= run.optimizer.state_dict()["state"][0]["step"] <= 12
    assert fresh.sampler.drawn == fresh.observers[0].count == 0


def test_a_finished_run_that_is_given_more_steps_goes_on(tmp_path, uninterrupted):
    resumed(tmp_path, max_steps=4)
    assert_alike(resumed(tmp_path), uninterrupted)


def test_a_finished_run_stays_as_it_is(tmp_path):
    first = resumed(tmp_path, max_steps=2)
    again = resumed(tmp_path, max_steps=2)
    assert torch.equal(again.policy.table, first.policy.table)
    assert len(again.journal.read()) == 2


@pytest.mark.slow
def test_a_process_that_is_killed_outright_goes_on_exactly(tmp_path, capsys):
    changes = {"max_steps": 100_000, "save_steps": 2}
    plan_file = tmp_path / "plan.yaml"
    plan_file.write_text(json.dumps(plan(tmp_path / "run", **{**EVERYTHING, **changes})))
    process = subprocess.Popen(
        [sys.executable, "-m", "mmrl", "train", str(plan_file)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while len(checkpoint.checkpoints(tmp_path / "run")) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        journal = (tmp_path / "run" / "metrics.jsonl").read_text()
        assert main(["train", str(plan_file)]) == 2
        held = f"run' is in use by process {process.pid} on "
        assert held in capsys.readouterr().err
        assert (tmp_path / "run" / "metrics.jsonl").read_text().startswith(journal)
    finally:
        process.kill()
        process.wait()
    reached = checkpoint.step_of(checkpoint.checkpoints(tmp_path / "run")[0])
    steps = {"max_steps": reached + 3, "save_steps": 2}
    assert_alike(resumed(tmp_path / "run", **steps), resumed(tmp_path / "whole", **steps))


@pytest.mark.slow
def test_runs_that_are_killed_at_random_instants_end_as_if_nothing_had_happened(tmp_path):
    command = [sys.executable, "-m", "tests.killing", str(tmp_path), "--kills", "6", "--steps", "6"]
    home = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(" kills")[0] for line in done.stdout.splitlines()] == [
        "text: 6",
        "image: 6",
        "pair: 6",
    ]


# ---- half a checkpoint


def cut(data):
    return data[:-20]


def flipped(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("damage", [cut, flipped])
@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.TENSORS, "model/model.safetensors"])
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path, uninterrupted, name, damage, capsys):
    killed(tmp_path, at=6)
    file = tmp_path / "checkpoint-6" / name
    file.write_bytes(damage(file.read_bytes()))
    run = toy_run(tmp_path, **EVERYTHING)
    run.console.quiet = False
    train(run)
    printed = capsys.readouterr().out
    assert "checkpoint-6' is not a whole checkpoint of mmrl" in printed
    assert "looking at the one before" in printed
    assert f"going on from {tmp_path / 'checkpoint-3'}" in printed
    assert_alike(run, uninterrupted)


def test_a_checkpoint_that_was_being_written_is_not_looked_at(tmp_path, uninterrupted):
    killed(tmp_path, at=4)
    unfinished = tmp_path / "checkpoint-5.tmp" / "model"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert_alike(resumed(tmp_path), uninterrupted)


def test_nothing_is_begun_anew_while_checkpoints_cannot_be_read(tmp_path, uninterrupted, monkeypatch):
    killed(tmp_path, at=6)
    journal = (tmp_path / "metrics.jsonl").read_text()
    opened = Path.open

    def fails(path, *args, **options):
        if "checkpoint-" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(checkpoint.CheckpointError) as caught:
        patch.setattr(Path, "open", fails)
        resumed(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"none of the 2 checkpoints of '{tmp_path}' can be used, and nothing was changed")
    assert "checkpoint-6' is not" in said and "checkpoint-3' is not" in said
    assert "Input/output error" in said and "overwrite_output_dir=true" in said
    assert (tmp_path / "metrics.jsonl").read_text() == journal
    assert_alike(resumed(tmp_path), uninterrupted)


def test_a_folder_that_cannot_be_listed_is_not_begun_anew(tmp_path, uninterrupted, monkeypatch):
    killed(tmp_path, at=6)
    listed = os.listdir

    def fails(path="."):
        if str(path) == str(tmp_path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(os, "listdir", fails)
        patch.setattr(os, "scandir", fails)
        resumed(tmp_path)
    assert_alike(resumed(tmp_path), uninterrupted)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (ToyText, "save", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("safetensors.torch", "save_file", SafetensorError("No space left on device (os error 28)")),
        (Path, "write_text", FULL),
        (os, "fsync", FULL),
        (Path, "rename", FULL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_full_disk_is_a_clear_error_and_leaves_the_older_checkpoint(
    tmp_path, uninterrupted, monkeypatch, capsys, place, name, error
):
    killed(tmp_path, at=5)
    place = importlib.import_module(place) if isinstance(place, str) else place
    run = toy_run(tmp_path, **EVERYTHING)
    saves = run.save

    def fails(*args, **options):
        raise error

    def save(step):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            saves(step)

    run.save = save
    with pytest.raises(checkpoint.CheckpointError) as caught:
        train(run)
    assert str(caught.value).startswith(f"cannot save '{tmp_path / 'checkpoint-6'}': {type(error).__name__}")
    assert "No space left on device" in str(caught.value)
    assert str(caught.value).endswith("the same command goes on from checkpoint-3")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert_alike(resumed(tmp_path), uninterrupted)


@pytest.mark.parametrize("name", ["checkpoint-6.tmp", "checkpoint-6"])
def test_a_file_in_the_place_of_a_checkpoint_does_not_keep_it_from_being_saved(tmp_path, uninterrupted, name):
    killed(tmp_path, at=4)
    run = toy_run(tmp_path, **EVERYTHING)
    finish = run.finish

    def finishing(step, collection, credit):
        (tmp_path / name).write_text("not a folder") if step == 5 else None
        finish(step, collection, credit)

    run.finish = finishing
    train(run)
    assert_alike(run, uninterrupted)


def test_a_line_that_was_cut_short_is_written_anew(tmp_path, uninterrupted):
    killed(tmp_path, at=5)
    journal = tmp_path / "metrics.jsonl"
    journal.write_text(journal.read_text()[:-30])
    assert_alike(resumed(tmp_path), uninterrupted)


# ---- the folder


def test_a_folder_in_use_is_refused_and_free_afterwards(tmp_path):
    run = toy_run(tmp_path, **EVERYTHING)
    in_use = rf"'{tmp_path}' is in use by process"
    with locked(tmp_path, run.processes), pytest.raises(ConfigError, match=in_use):
        train(run)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    killed(tmp_path, at=1)
    assert len(resumed(tmp_path, max_steps=1, overwrite_output_dir=True).journal.read()) == 1


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"learn": {"learning_rate": 0.2}}, {"rewards": ["tests.toys:brevity"]}],
    ids=["seed", "learn", "rewards"],
)
def test_another_configuration_is_refused(tmp_path, changes):
    resumed(tmp_path, max_steps=1)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="holds a run with another configuration .* overwrite_output_dir"):
        resumed(tmp_path, max_steps=1, **changes)
    assert (tmp_path / "config.yaml").read_text() == before
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.5, 0.98], ids=str)
def test_a_broken_configuration_is_called_broken_and_the_advice_goes_on(tmp_path, uninterrupted, cut):
    killed(tmp_path, at=4)
    written = tmp_path / "config.yaml"
    text = written.read_text()
    written.write_text(text[: int(cut * len(text))])
    with pytest.raises(ConfigError, match=r"config.yaml' is broken, .* remove that file and start it again"):
        resumed(tmp_path)
    written.unlink()
    assert_alike(resumed(tmp_path), uninterrupted)
    assert written.read_text() == text


@pytest.mark.parametrize("moment", ["write_text", "replace"])
def test_a_configuration_is_whole_whenever_the_process_is_killed(tmp_path, monkeypatch, moment):
    resumed(tmp_path, max_steps=1)
    before = (tmp_path / "config.yaml").read_text()

    def dies(path, *args, **options):
        if moment == "write_text":
            path.open("w").write("half")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, moment, dies)
        resumed(tmp_path, max_steps=2)
    assert (tmp_path / "config.yaml").read_text() == before
    assert len(resumed(tmp_path, max_steps=2).journal.read()) == 2


def test_a_configuration_that_did_not_change_is_not_written_again(tmp_path):
    resumed(tmp_path, max_steps=1)
    before = (tmp_path / "config.yaml").stat()
    resumed(tmp_path, max_steps=1)
    after = (tmp_path / "config.yaml").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_how_often_to_save_and_report_may_change(tmp_path):
    resumed(tmp_path, max_steps=1)
    changed = {"save_steps": 1, "save_total_limit": 5, "report": {"log_completions": False, "trackers": []}}
    resumed(tmp_path, max_steps=3, **changed)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
    ]
    assert len(list((tmp_path / "completions").iterdir())) == 1


def test_a_run_may_be_thrown_away(tmp_path):
    resumed(tmp_path, max_steps=2, save_steps=1)
    run = resumed(tmp_path, max_steps=1, seed=1, overwrite_output_dir=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert len(run.journal.read()) == 1


def test_a_folder_that_holds_no_run_is_not_thrown_away(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files but no run"):
        resumed(tmp_path, max_steps=1, overwrite_output_dir=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_written_configuration_repeats_the_run(tmp_path, uninterrupted):
    from mmrl.build import build
    from mmrl.config import load

    config = load(uninterrupted.folder / "config.yaml", [f"output_dir={tmp_path}"])
    run = build(config, quiet=True)
    train(run)
    assert_alike(run, uninterrupted)


def test_no_more_checkpoints_than_the_limit(tmp_path):
    resumed(tmp_path, save_steps=1, save_total_limit=2, max_steps=4)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
