"""Stages of a run: each goes on from the one before, and a resume is exact wherever it was killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.cli import main
from mmrl.config.gates import gates_of
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Config, parse
from mmrl.config.stages import load_stages
from mmrl.reporting import html
from mmrl.reporting.metrics import Journal
from mmrl.runtime import checkpoint
from mmrl.runtime.stages import RECORD, last_finished, read_stages
from mmrl.training import stages as runner
from mmrl.training.checkpointing import check_output_folder
from tests.support.distributed_worker import start
from tests.support.fork_server import server
from tests.support.killing import differences
from tests.support.resuming import Killed
from tests.support.staging import STAGES, staged, trained
from tests.support.toys import plan, toy_run

TOYS = "tests.support.toys"


def without_pages(monkeypatch):
    monkeypatch.setattr(html, "write_page", lambda folder: folder)
    monkeypatch.setattr(runner, "write_report", lambda home, output=None: home)


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    without_pages(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "write_page", lambda folder: folder)
        trained(folder)
    return folder


def state_of(folder):
    return checkpoint.read_state(checkpoint.checkpoints(folder)[0])


def table_of(folder):
    return load_file(checkpoint.checkpoints(folder)[0] / "model" / "model.safetensors")["table"]


def test_a_stage_begins_where_the_one_before_ended(whole):
    records = read_stages(whole)
    assert [(r.folder, r.checkpoint) for r in records[:2:2]] == [("1-source", "checkpoint-3")]
    first = state_of(whole / "2-target")["references"]["ref"]["weights"]["table"]
    assert torch.equal(first, table_of(whole / "1-source"))  # its reference is frozen at its first weights
    assert not state_of(whole / "1-source")["references"]["ref"]["weights"]["table"].any()
    assert last_finished(whole) == whole / "3-last" / "checkpoint-3"


def test_what_is_carried_goes_on_and_nothing_else(whole):
    steps = [state_of(whole / name)["optimizer"]["state"] for name in ("1-source", "2-target", "3-last")]
    taken = [record.step for record in read_stages(whole)]
    assert [float(next(iter(s.values()))["step"]) for s in steps] == [taken[0], sum(taken[:2]), sum(taken)]
    drawn = [state_of(whole / name)["pieces"] for name in ("1-source", "2-target", "3-last")]
    drawn = [next(v for k, v in pieces.items() if k.startswith("sampler"))["drawn"] for pieces in drawn]
    # Four prompts a step; the second stage has its own sampler, which the third one carries on.
    assert drawn == [4 * taken[0], 4 * taken[1], 4 * (taken[1] + taken[2])]


def test_a_stage_ends_by_its_metric(whole):
    rewards = [record["reward"] for record in Journal(whole / "2-target").read()]
    means = [sum(pair) / 2 for pair in zip(rewards, rewards[1:], strict=False)]
    assert means[-1] > 0.11 and max(means[:-1]) <= 0.11 and 2 <= len(rewards) < 8


@pytest.mark.parametrize(
    ("stage", "step"),
    [
        (1, 1),
        (0, "record"),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in ((0, 0), (0, 2), (1, 0), (2, "build"), (2, 2))),
    ],
)
def test_a_killed_run_in_stages_ends_as_one_that_nobody_killed(tmp_path, whole, monkeypatch, stage, step):
    killed_at(monkeypatch, tmp_path, stage, step)
    monkeypatch.undo()
    without_pages(monkeypatch)
    trained(tmp_path / "run")
    assert not differences_of(tmp_path / "run", whole)


def differences_of(one, other):
    """Compare every stage; the page and the record are compared by their text."""
    assert read_stages(one) == read_stages(other)
    return {
        r.folder: found for r in read_stages(one) if (found := differences(one / r.folder, other / r.folder))
    }


def killed_at(monkeypatch, folder, stage, step):
    """Train until a step of a stage, or until its run is built or its record written, and fall over."""
    loaded, built = staged(folder / "run"), []

    def dying(config):
        run = build(config, quiet=True)
        built.append(run)
        if len(built) - 1 == stage and step == "build":
            raise Killed
        finish = run.finish

        def finish_or_die(at, collection, credit):
            if len(built) - 1 == stage and at == step:
                raise Killed
            finish(at, collection, credit)

        run.finish = finish_or_die
        return run

    write = runner.write_stages

    def write_or_die(home, records):
        if step == "record" and len(built) - 1 == stage:
            raise Killed
        write(home, records)

    monkeypatch.setattr(runner, "write_stages", write_or_die)
    with pytest.raises(Killed):
        runner.train_stages(loaded, dying, quiet=True)


def test_stages_draw_other_noise_and_evaluate_alike(tmp_path):
    changes = {
        "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 4}},
        "eval_on_start": True,
    }
    trained(
        tmp_path / "run", stages=[{"max_steps": 1}, {"max_steps": 1}], **changes, learn={"learning_rate": 0.0}
    )
    records = [Journal(tmp_path / "run" / name).read() for name in "12"]
    starts = [{k: v for k, v in r[0].items() if "seconds" not in k} for r in records]
    assert starts[0] == starts[1] and records[0][1]["reward"] != records[1][1]["reward"]


def test_finished_stages_stay_as_they_are(tmp_path, monkeypatch):
    two = STAGES[:2]
    trained(tmp_path / "run", stages=two)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != RECORD}
    trained(tmp_path / "run", stages=two)
    after = {path: path.stat().st_mtime_ns for path in before}
    changed = [path for path in before if after[path] != before[path] and path.is_file()]
    assert [path.name for path in changed] in ([], [".lock"])
    trained(tmp_path / "run")  # a stage that is added goes on from there
    assert len(read_stages(tmp_path / "run")) == 3 and last_finished(tmp_path / "run").parent.name == "3-last"


def test_the_best_checkpoint_is_handed_on_where_one_is_chosen(tmp_path):
    best = {"metric_for_best_model": "reward", "save_steps": 1}
    trained(tmp_path / "run", stages=[{"name": "a", "max_steps": 4, **best}, {"max_steps": 1}])
    rewards = [record["reward"] for record in Journal(tmp_path / "run" / "1-a").read()]
    step = rewards.index(max(rewards)) + 1
    assert read_stages(tmp_path / "run")[0].checkpoint == f"checkpoint-{step}"
    config = (tmp_path / "run" / "2" / "config.yaml").read_text()
    assert f"init_from: {tmp_path}/run/1-a/checkpoint-{step}\n" in config


EVALUATED = {"data": {"name": "tests.support.toys:prompts", "num": 4}, "rewards": [f"{TOYS}:share_right"]}


def gated(folder, **keep_if):
    stages = [{"name": "a", "max_steps": 1}, {"name": "b", "keep_if": keep_if}, {"name": "c", "max_steps": 1}]
    return trained(folder, stages=stages, evaluation=EVALUATED)


def test_a_stage_that_gets_worse_is_not_kept(tmp_path, capsys):
    run = tmp_path / "run"
    for _ in range(2):  # the same command refuses it again
        with pytest.raises(
            runner.StageRefused, match=r"stage 'b' is not kept.*wants it not below previous \+ 0.9"
        ):
            gated(run, of="eval_share_right", not_below="previous + 0.9")
        kept = read_stages(run)
        assert [bool(record.checkpoint) for record in kept] == [True, False, False]
        assert last_finished(run).parent.name == "1-a" and not (run / "3-c").exists()
    weights = (run / "2-b" / "checkpoint-3" / "model" / "model.safetensors").stat().st_mtime_ns
    gated(run, of="eval_share_right", not_below="previous - 0.9")
    assert all(record.checkpoint for record in read_stages(run))
    assert (run / "2-b" / "checkpoint-3" / "model" / "model.safetensors").stat().st_mtime_ns == weights
    values = [record.metrics["eval_share_right"] for record in read_stages(run)]
    assert values[1] == json.loads((run / "2-b" / "evaluation.json").read_text())["metrics"]["share_right"]


def test_the_best_checkpoint_is_what_a_gate_reads(tmp_path):
    best = {"metric_for_best_model": "eval_share_right", "eval_steps": 1, "save_steps": 1}
    changes = {"evaluation": EVALUATED, "learn": {"learning_rate": 0.5}, "max_steps": 4, **best}
    trained(tmp_path / "run", stages=[{"keep_if": {"of": "eval_share_right", "not_below": 0.01}}], **changes)
    (record,) = read_stages(tmp_path / "run")
    values = [
        r["eval_share_right"] for r in Journal(tmp_path / "run" / "1").read() if "eval_share_right" in r
    ]
    assert record.metrics == {"eval_share_right": max(values)}


@pytest.mark.parametrize(
    ("gate", "value", "before", "kept"),
    [
        ({"not_below": 0.5}, 0.5, 0.0, True),
        ({"not_below": 0.5}, 0.49, 0.0, False),
        ({"not_below": "previous - 0.01"}, 0.595, 0.6, True),
        ({"not_below": "previous-1e-2"}, 0.585, 0.6, False),
        ({"not_above": "previous"}, 0.61, 0.6, False),
        ({"not_below": 0.1, "not_above": "previous + .5"}, 0.3, 0.0, None),
        ({"not_below": 0.1, "not_above": "previous + 0.5"}, 0.3, 0.0, True),
        ({"not_below": 0.1}, float("nan"), 0.0, False),
    ],
)
def test_a_gate_is_a_bound(gate, value, before, kept):
    if kept is None:
        with pytest.raises(ConfigError, match="must be a number, or `previous` with"):
            gates_of({"of": "eval_x", **gate}, "keep_if")
        return
    (made,) = gates_of({"of": "eval_x", **gate}, "keep_if")
    assert bool(made.refusal({"eval_x": value}, {"eval_x": before})) is not kept
    with pytest.raises(ConfigError, match="the evaluation has no metric 'eval_x'; did you mean 'eval_xy'"):
        made.refusal({"eval_xy": 1.0}, {})


def test_a_gate_is_changed_on_the_command_line(tmp_path):
    stages = [{}, {"keep_if": {"of": "eval_share_right", "not_below": "previous"}}]
    loaded = staged(tmp_path, "stages.1.keep_if.not_below=0.25", stages=stages, evaluation=EVALUATED)
    assert [gate.not_below for gate in loaded[1].keep_if] == [0.25] and not loaded[0].keep_if


def test_what_a_stage_leaves_out_is_filled_in(tmp_path):
    first, second, third = staged(tmp_path, "seed=7", "max_steps=2", "stages.target.max_steps=5")
    assert [s.config.seed for s in (first, second, third)] == [7, 7, 7]
    assert [s.config.stage for s in (first, second, third)] == [0, 1, 1]  # the third carries the sampler
    assert [s.config.max_steps for s in (first, second, third)] == [2, 5, 2]
    assert [s.begins for s in (first, second, third)] == [None, 0, 1]
    assert [s.config.init_references for s in (first, second, third)] == [False, True, True]
    other = staged(tmp_path, "stages.2.init_from=source", "stages.1.init_from=")
    assert [s.begins for s in other] == [None, None, 0] and other[1].config.init_from == ""
    epochs = staged(tmp_path, stages=[{"num_train_epochs": 2}, {"max_steps": 4}])
    assert [s.config.num_train_epochs for s in epochs] == [2.0, 0.0] and epochs[1].folder.name == "2"


@pytest.mark.parametrize(
    "text", ["stages.other.max_steps=2", "stages.5.max_steps=2", "stages.1.output_dir=b"]
)
def test_an_override_of_no_stage_is_an_error(tmp_path, text):
    with pytest.raises(ConfigError, match="must read stages.NAME.key=value with one of source, target, last"):
        staged(tmp_path, text)


def test_an_override_counts_stages_from_0(tmp_path):
    stages = staged(tmp_path, "stages.1.max_steps=7", stages=[{}, {}, {}])
    assert [stage.config.max_steps for stage in stages] == [3, 7, 3]


def test_a_file_without_stages_is_one_run(tmp_path):
    (stage,) = load_stages(plan(tmp_path))
    assert not stage.name and stage.config == toy_run(tmp_path).config


WRONG = [
    ([{"rollout": {"num_prompts": 0}}, {}], "'stages[0].rollout.num_prompts' must be at least 1, not 0"),
    ([{}, {"rewards": ["brevty"]}], "stages[1].rewards[0]: no reward is called 'brevty'"),
    ([{}, {"rolout": {}}], "stages[1]: there is no key 'rolout'; did you mean 'rollout'?"),
    ([{"name": "a"}, {"name": "a"}], "'stages[1].name' is 'a', as that of stages[0]"),
    ([{"name": "../a"}], "'stages[0].name' must be made of letters"),
    ([{}, {"output_dir": "b"}], "'stages[1].output_dir' belongs to the whole file; put it at its top"),
    ([{}, 3], "a stage must be a mapping of changes, not 3"),
    (
        [{"init_from": "b"}, {"name": "b"}, {}],
        "'stages[0].init_from' is 'b', which is no stage before",
    ),
    ([{}, {"init_from": "nowhere"}], "'stages[1].init_from' is 'nowhere', which is no folder"),
    ([{}, {"policy": "offline"}], "'stages[1].policy' is 'offline', but it begins from the weights of '1'"),
    ([{"carry": ["optimizer"]}, {}], "'stages[0].carry' names optimizer, but 'init_from' names no run"),
    ([{}, {"carry": ["momentum"]}], "'stages[1].carry[0]' must be one of 'optimizer'"),
    ([{}, {"until": {"name": "threshold", "of": "reward"}}], "stages[1].until: threshold wants `above` or"),
    ([{"include": ["nowhere.yaml"]}], "there is no file 'nowhere.yaml'"),
    (
        [{}, {"keep_if": {"of": "reward", "not_below": 0}}],
        "'stages[1].keep_if.of' must be a metric of the last",
    ),
    ([{"keep_if": {"of": "eval_x"}}], "'stages[0].keep_if' wants `not_below` or `not_above`, a number"),
    (
        [{"keep_if": {"of": "eval_x", "not_below": "before"}}],
        "'stages[0].keep_if.not_below' must be a number",
    ),
    ([{"keep_if": {"of": "eval_x", "not_below": 0}}], "stage '1' has no evaluation; set evaluation.data"),
    ([{"keep_if": [{"of": "eval_x", "not_below": "previous"}]}], "'1' begins from none; write a number"),
    (
        [{}, {"evaluation": EVALUATED, "keep_if": {"of": "eval_x", "not_below": "previous"}}],
        "'stages[1].keep_if' reads eval_x, but stage '1' has no evaluation",
    ),
    (
        [
            {"evaluation": EVALUATED},
            {
                "evaluation": {**EVALUATED, "num_generations": 2},
                "keep_if": {"of": "eval_x", "not_above": "previous"},
            },
        ],
        "'stages[1].keep_if' compares with stage '1', whose evaluation is another one",
    ),
    (
        [
            {
                "evaluation": EVALUATED,
                "metric_for_best_model": "reward",
                "keep_if": {"of": "eval_x", "not_below": 0},
            }
        ],
        "hands on the checkpoint with the best reward",
    ),
]


@pytest.mark.parametrize(("stages", "message"), WRONG)
def test_what_is_wrong_with_a_stage_is_said_before_anything_is_trained(tmp_path, stages, message):
    with pytest.raises(ConfigError) as raised:
        trained(tmp_path / "run", stages=stages)
    assert message in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_what_all_stages_have_wrong_is_said_once(tmp_path):
    with pytest.raises(ConfigError, match=r"^'rollout.num_prompts' must be at least 1, not 0"):
        staged(tmp_path, "rollout.num_prompts=0")


def test_a_folder_of_other_stages_is_not_gone_on_with(tmp_path):
    run = tmp_path / "run"
    trained(run, stages=STAGES[:2])
    with pytest.raises(ConfigError, match="holds '1-source' as stage 1, and the file has '1-other'"):
        trained(run, stages=[{**STAGES[0], "name": "other"}])
    with pytest.raises(ConfigError, match="2-target' began from '.*1-source', which is not as it was"):
        trained(run, "stages.source.max_steps=9", stages=STAGES[:2])
    with pytest.raises(ConfigError, match=r"stages\[0\]: '.*1-source' holds a run with another"):
        trained(run, "stages.source.rollout.num_generations=3", stages=STAGES[:2])
    with pytest.raises(ConfigError, match="holds the stages 1-source, 2-target; name another output_dir"):
        check_output_folder(parse(plan(run), Config))
    trained(run, "overwrite_output_dir=true", stages=[{"name": "last"}])
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == ["1-last"]


def test_a_folder_that_was_moved_is_gone_on_with(tmp_path):
    trained(tmp_path / "run", stages=[{"max_steps": 2}, {"max_steps": 2}])
    (tmp_path / "run").rename(tmp_path / "moved")
    trained(tmp_path / "moved", stages=[{"max_steps": 2}, {"max_steps": 3}])
    assert read_stages(tmp_path / "moved")[1].step == 3


def test_the_last_stage_can_be_trained_on(tmp_path):
    trained(tmp_path / "run", stages=[{"max_steps": 2}, {"max_steps": 2}])
    trained(tmp_path / "run", stages=[{"max_steps": 2}, {"max_steps": 4}])
    assert read_stages(tmp_path / "run")[1].step == 4
    assert [r["step"] for r in Journal(tmp_path / "run" / "2").read()] == [0, 1, 2, 3]


def test_stages_are_evaluated_with_the_model_of_the_last_one(tmp_path, capsys):
    evaluation = {"data": {"name": "tests.support.toys:prompts", "num": 4}}
    trained(tmp_path / "run", stages=[{"max_steps": 1}, {"max_steps": 2}], evaluation=evaluation)
    folder = tmp_path / "run" / "2"
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert f"model: {folder / 'checkpoint-2'}" in capsys.readouterr().out
    found = [json.loads((at / "evaluation.json").read_text()) for at in (folder, folder / "evaluation")]
    assert found[0]["metrics"]["share_right"] == found[1]["metrics"]["share_right"]


def started(file):
    """Start the command, and return when it has begun a stage or ended."""
    process = server(0).fork("tests.support.staging", ["train", str(file)], os.environ)
    while "\n" not in process.printed() and process.poll() is None:
        time.sleep(0.005)
    return process


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_moment_goes_on_exactly(tmp_path, whole):
    draw, kills = random.Random(1), 0
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**plan(tmp_path / "run", max_steps=3, save_steps=2), "stages": STAGES}))
    for number in (signal.SIGKILL, signal.SIGTERM) * 2:
        process = started(file)
        if "all 3 stages" in process.printed():
            break
        time.sleep(draw.uniform(0, 0.7))
        if process.poll() is None:
            os.kill(process.pid, number)
        process.communicate(timeout=600)
        kills += process.returncode != 0 or not read_stages(tmp_path / "run")[-1].checkpoint
    process = started(file)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "all 3 stages are finished" in printed and kills > 1
    assert not differences_of(tmp_path / "run", whole)


@pytest.mark.slow
def test_two_processes_train_stages_as_one(tmp_path):
    exact = {
        "policy": {"name": f"{TOYS}:ToyText", "double": True},
        "objective": {"aggregation": "step_mean"},
        "learn": {"optimizer": "sgd", "learning_rate": 0.5},
    }
    file = tmp_path / "run.yaml"
    stages = json.loads(json.dumps(STAGES))
    stages[1]["learn"] = {"learning_rate": 0.7}
    raw = plan(tmp_path / "two", max_steps=3, save_steps=2, **exact)
    file.write_text(json.dumps({**raw, "stages": stages}))
    processes = start("mmrl.cli", ["train", str(file)], 2)
    printed = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    trained(tmp_path / "one", stages=stages, save_steps=2, **exact)
    records = [read_stages(tmp_path / name) for name in ("one", "two")]
    assert [(r.folder, r.checkpoint) for r in records[0]] == [(r.folder, r.checkpoint) for r in records[1]]
    for record in records[0]:
        tables = [table_of(tmp_path / name / record.folder) for name in ("one", "two")]
        assert (tables[0] - tables[1]).abs().max() < 1e-12 and tables[0].any()
    assert records[0][1].metrics == pytest.approx(records[1][1].metrics)
