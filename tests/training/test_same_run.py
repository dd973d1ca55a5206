"""A run that goes on is the same run: code, defaults, versions and checkpoints, or what differs is named."""

from __future__ import annotations

import json
import shutil

import pytest

from mmrl.build import build
from mmrl.config import objects
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.runtime import checkpoint
from mmrl.runtime.checkpoint import CheckpointError
from mmrl.runtime.folders import MARK, mark_of
from mmrl.training import record
from mmrl.training.checkpointing import check_output_folder
from mmrl.training.loop import train
from tests.support.toys import plan, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

CELL = """
WEIGHTS = {"a": 1.0}
CALLS = []

def helper(text):
    return WEIGHTS.get(text[:1], 0.0)

def short(prompts, completions, **columns):
    CALLS.append(len(completions))
    return [helper(text) + 1 / (1 + len(text)) for text in completions]
"""


def trained(folder, **changes):
    run = toy_run(folder, **changes)
    train(run)
    return run


def cell(folder, source, **changes):
    """Train with a reward that a cell of a notebook defines, as `mmrl.Trainer` does."""
    space = {"__name__": "__main__"}
    exec(source, space)
    config = parse(plan(folder, rewards=[objects.put("short", space["short"])], **changes), Config)
    check_output_folder(config)
    run = build(config, quiet=True)
    train(run)
    return run


def test_an_edited_reward_is_an_error_and_never_the_old_numbers(tmp_path):
    cell(tmp_path, CELL, max_steps=2)
    for steps in (2, 3):  # done before, or to go on in the middle
        for old, new in (("1 / (1", "2 / (1"), ('"a": 1.0', '"a": 2.0'), ("text[:1]", "text[-1:]")):
            with pytest.raises(
                ConfigError, match=r"begun with other code of rewards\[0\] 'python:short'; .*init_from="
            ):
                cell(tmp_path, CELL.replace(old, new), max_steps=steps)
    remarked = CELL.replace("    CALLS", '    "What it does."\n    # why\n    CALLS')
    run = cell(tmp_path, remarked, max_steps=3)
    assert run.progress.step == 3 and not any("code" in text for text in run.report.raised)
    cell(tmp_path, CELL.replace("1 / (1", "2 / (1"), max_steps=1, overwrite_output_dir=True)


def test_a_default_that_changed_is_named_and_may_be_written_out(tmp_path):
    trained(tmp_path, max_steps=1)
    known = mark_of(tmp_path)
    eps = [piece for piece in known["config"]["advantage"] if piece["name"] == "group_normalize"][0]
    now = eps["eps"]
    eps["eps"] = 0.5  # as if the version before had another default
    del eps["scale"]  # and lacked an option
    (tmp_path / MARK).write_text(json.dumps(known))
    with pytest.raises(ConfigError, match=rf"advantage.*eps is 0.5 there and {now} here"):
        trained(tmp_path, max_steps=2)
    names = [piece["name"] for piece in known["config"]["advantage"]]
    chain = [{"name": n, "eps": 0.5} if n == "group_normalize" else n for n in names]
    assert trained(tmp_path, max_steps=2, advantage=chain).progress.step == 2


@pytest.mark.slow
def test_another_version_is_a_warning_that_names_the_code_it_changed(tmp_path, monkeypatch):
    trained(tmp_path, max_steps=1)
    known = mark_of(tmp_path)
    known["versions"] = [text if not text.startswith("mmrl") else "mmrl 0.0.0" for text in known["versions"]]
    library = next(place for place, (_, _, library) in known["code"].items() if library)
    known["code"][library][1] = "0" * 16
    (tmp_path / MARK).write_text(json.dumps(known))
    (said,) = [text for text in trained(tmp_path, max_steps=2).report.raised if "goes on with" in text]
    assert "so far with mmrl 0.0.0" in said and f"the code of {library} " in said
    assert not [
        text for text in trained(tmp_path, max_steps=3).report.raised if "mmrl 0.0.0" in text and text != said
    ]
    known = mark_of(tmp_path)
    known["code"][library][1] = "0" * 16  # of the same version: somebody edited it
    (tmp_path / MARK).write_text(json.dumps(known))
    with pytest.raises(ConfigError, match="begun with other code of"):
        trained(tmp_path, max_steps=4)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    trained(tmp_path / "other", max_steps=4, learn={"learning_rate": 0.5})
    trained(tmp_path / "mine", max_steps=2)
    shutil.copytree(tmp_path / "other" / "checkpoint-4", tmp_path / "mine" / "checkpoint-4")
    run = toy_run(tmp_path / "mine", max_steps=5, save_steps=1, save_total_limit=1)
    said = []
    run.report.console.say = said.append
    train(run)
    assert any(
        "checkpoint-4' is a checkpoint of another run; looking at the one before" in text for text in said
    )
    assert any(text.endswith("mine/checkpoint-2") for text in said)
    assert (tmp_path / "mine" / "checkpoint-4.other1" / checkpoint.SUMS).is_file()
    for path in (tmp_path / "mine").glob("checkpoint-*"):
        shutil.rmtree(path)
    shutil.copytree(tmp_path / "other" / "checkpoint-4", tmp_path / "mine" / "checkpoint-4")
    with pytest.raises(CheckpointError, match="another run"):
        trained(tmp_path / "mine", max_steps=5)


def test_a_checkpoint_alone_knows_its_run(tmp_path):
    trained(tmp_path / "a", max_steps=2)
    shutil.copytree(tmp_path / "a" / "checkpoint-2", tmp_path / "b" / "checkpoint-2")
    with pytest.raises(ConfigError, match="seed is 0 there and 1 here"):
        trained(tmp_path / "b", max_steps=3, seed=1)
    assert trained(tmp_path / "b", max_steps=3).progress.step == 3
    assert mark_of(tmp_path / "b")["run"] == mark_of(tmp_path / "a")["run"]


def test_a_run_of_a_version_without_marks_goes_on(tmp_path):
    trained(tmp_path, max_steps=2)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        (folder / MARK).unlink()
    sums = tmp_path / "checkpoint-2" / checkpoint.SUMS
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if MARK not in line))
    with pytest.raises(ConfigError, match="another configuration: seed"):
        trained(tmp_path, max_steps=3, seed=1)
    assert trained(tmp_path, max_steps=3).progress.step == 3
    assert trained(tmp_path, max_steps=4).progress.step == 4


def test_a_foreign_configuration_is_not_overwritten_or_thrown_away(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    (tmp_path / "thesis.txt").write_text("years of work")
    for changes in ({}, {"overwrite_output_dir": True}):
        config = parse(plan(tmp_path, **changes), Config)
        with pytest.raises(ConfigError, match="config.yaml.*which no `mmrl train` made"):
            check_output_folder(config)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n" and (tmp_path / "thesis.txt").exists()


def test_two_runs_that_begin_alike_have_one_name(tmp_path):
    configs = [parse(plan(tmp_path / n, **c), Config) for n, c in (("a", {}), ("b", {}), ("c", {"seed": 1}))]
    one, other, seeded = (record.name_of(record.record_of(config)) for config in configs)
    assert one == other != seeded
