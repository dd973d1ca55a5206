"""What is in an output folder when a run starts again: damage, full disks, other runs, other processes."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
from safetensors import SafetensorError

from mmrl.config.schema import ConfigError
from mmrl.reporting import html
from mmrl.reporting.metrics import of_training
from mmrl.runtime import checkpoint
from mmrl.runtime.files import LOCK, locked
from mmrl.runtime.folders import MARK
from mmrl.training import loop
from mmrl.training.loop import train
from tests.support.resuming import EVERYTHING, Killed, assert_alike, killed, resumed
from tests.support.toys import ToyText, toy_run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html.pages, "curves", lambda runs: [])
        return resumed(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def fallen(tmp_path_factory):
    """Put a run that fell over at the end of a step into a folder; one run of each step is copied."""

    @cache
    def made(at):
        folder = tmp_path_factory.mktemp("fallen")
        killed(folder, at=at)
        return folder

    def copy(folder, at):
        shutil.copytree(made(at), folder, dirs_exist_ok=True)
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace(str(made(at)), str(folder)))

    return copy


# ---- half a checkpoint


def cut(data):
    return data[:-20]


def flipped(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("damage", [cut, flipped])
@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.TENSORS, "model/model.safetensors", MARK])
def test_a_damaged_checkpoint_is_skipped_with_a_message(
    tmp_path, uninterrupted, fallen, name, damage, capsys
):
    fallen(tmp_path, at=6)
    file = tmp_path / "checkpoint-6" / name
    file.write_bytes(damage(file.read_bytes()))
    run = toy_run(tmp_path, **EVERYTHING)
    run.report.console.quiet = False
    train(run)
    printed = capsys.readouterr().out
    assert "checkpoint-6' is not a whole checkpoint of mmrl" in printed
    assert "looking at the one before" in printed
    assert f"going on from {tmp_path / 'checkpoint-3'}" in printed
    assert_alike(run, uninterrupted)


def test_a_checkpoint_that_was_being_written_is_not_looked_at(tmp_path, uninterrupted, fallen):
    fallen(tmp_path, at=4)
    unfinished = tmp_path / "checkpoint-5.tmp" / "model"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert_alike(resumed(tmp_path), uninterrupted)


def test_nothing_is_begun_anew_while_checkpoints_cannot_be_read(tmp_path, uninterrupted, fallen, monkeypatch):
    fallen(tmp_path, at=6)
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


def test_a_folder_that_cannot_be_listed_is_not_begun_anew(tmp_path, uninterrupted, fallen, monkeypatch):
    fallen(tmp_path, at=6)
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
    tmp_path, uninterrupted, fallen, monkeypatch, capsys, place, name, error
):
    fallen(tmp_path, at=5)
    place = importlib.import_module(place) if isinstance(place, str) else place
    run = toy_run(tmp_path, **EVERYTHING)
    saves = loop.save

    def fails(*args, **options):
        raise error

    def save(run):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            saves(run)

    with monkeypatch.context() as patch, pytest.raises(checkpoint.CheckpointError) as caught:
        patch.setattr(loop, "save", save)
        train(run)
    assert str(caught.value).startswith(f"cannot save '{tmp_path / 'checkpoint-6'}': {type(error).__name__}")
    assert "No space left on device" in str(caught.value)
    assert str(caught.value).endswith("the same command goes on from checkpoint-3")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert_alike(resumed(tmp_path), uninterrupted)


@pytest.mark.parametrize("name", ["checkpoint-6.tmp", "checkpoint-6"])
def test_a_file_in_the_place_of_a_checkpoint_does_not_keep_it_from_being_saved(
    tmp_path, uninterrupted, fallen, name
):
    fallen(tmp_path, at=4)
    run = toy_run(tmp_path, **EVERYTHING)
    finish = run.finish

    def finishing(step, collection, credit):
        (tmp_path / name).write_text("not a folder") if step == 5 else None
        finish(step, collection, credit)

    run.finish = finishing
    train(run)
    assert_alike(run, uninterrupted)


def test_a_line_that_was_cut_short_is_written_anew(tmp_path, uninterrupted, fallen):
    fallen(tmp_path, at=5)
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
    assert len(of_training(resumed(tmp_path, max_steps=1, overwrite_output_dir=True).journal.read())) == 1


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"learn": {"num_iterations": 1}}, {"rewards": ["tests.support.toys:brevity"]}],
    ids=["seed", "learn", "rewards"],
)
def test_another_configuration_is_refused(tmp_path, changes):
    resumed(tmp_path, max_steps=1)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="holds a run with another configuration: .* overwrite_output_dir"):
        resumed(tmp_path, max_steps=1, **changes)
    assert (tmp_path / "config.yaml").read_text() == before
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.5, 0.98], ids=str)
def test_a_broken_configuration_is_called_broken_and_the_advice_goes_on(tmp_path, uninterrupted, fallen, cut):
    fallen(tmp_path, at=4)
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
    assert len(of_training(resumed(tmp_path, max_steps=2).journal.read())) == 2


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
    assert len(of_training(run.journal.read())) == 1


def test_a_folder_that_holds_no_run_is_not_thrown_away(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files but no run"):
        resumed(tmp_path, max_steps=1, overwrite_output_dir=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_written_configuration_repeats_the_run(tmp_path, uninterrupted):
    from mmrl.build import build
    from mmrl.config.schema import load

    config = load(uninterrupted.folder / "config.yaml", [f"output_dir={tmp_path}"])
    run = build(config, quiet=True)
    train(run)
    assert_alike(run, uninterrupted)


def test_no_more_checkpoints_than_the_limit(tmp_path):
    resumed(tmp_path, save_steps=1, save_total_limit=2, max_steps=4)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
