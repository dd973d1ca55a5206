"""Faults of a run: twenty of them with the message that a user sees, and what is left to look at."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from mmrl.cli import main
from mmrl.core.step_table import Batch
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime import checkpoint
from mmrl.runtime.watchdog import listening
from mmrl.training.checkpointing import resume
from mmrl.training.loop import largest_first, train
from mmrl.training.nonfinite import NotFinite, OutOfMemory
from mmrl.training.trainer import Run
from tests.support.fork_server import command
from tests.support.toys import ToyGenerate, ToyText, plan, prompts, toy_run

HERE = __name__
ROOT = Path(__file__).parents[2]


# ---- what goes wrong


@per_outcome
def broken(prompt, outcome):
    raise LookupError("no span")


@per_outcome
def undefined(prompt, outcome):
    return math.nan


@per_outcome
def endless(prompt, outcome):
    return math.inf


def too_few(prompts, outcomes):
    return [1.0]


@per_outcome
def in_words(prompt, outcome):
    return "0.5"


@per_outcome
def late(prompt, outcome):
    time.sleep(0.2)  # for each of the outcomes, seconds in all
    return 1.0


async def never(prompts, outcomes):
    raise TimeoutError("the judge is asleep")


class Full(ToyText):
    """Has room for 8 steps in a forward pass, or for none while it is `crammed`."""

    room, sizes = 8, []

    def __call__(self, batch, extra=frozenset()):
        Full.sizes.append(batch.mask.numel())
        if batch.mask.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore of it")
        return super().__call__(batch, extra)


class Crammed(Full):
    room = 0


class Greedily(ToyGenerate):
    """Runs out of memory while it generates."""

    def rollout(self, prompts):
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Mute(ToyGenerate):
    """Makes outcomes that stand in the wrong order."""

    def rollout(self, prompts):
        from dataclasses import replace

        rows = super().rollout(prompts)
        return tuple(
            replace(row, outcomes=(replace(row.outcomes[0], end=3), replace(row.outcomes[0], end=1)))
            for row in rows
        )


def divided_by_nothing(log_ratio, new, batch):
    """Give a loss without an end."""
    return new.logp * batch.advantage / 0.0


def kinked(log_ratio, new, batch):
    """Give a loss of 0 whose slope is infinite."""
    return (new.logp - new.logp.detach()).abs().sqrt()


def one_bad_row(log_ratio, new, batch):
    """Spoil the rows of the first prompt of the data."""
    return torch.where((batch.steps.prompt == 0)[:, None], math.nan, -log_ratio.exp() * batch.advantage)


@pytest.fixture
def file(tmp_path):
    def write(**changes: Any) -> str:
        path = tmp_path / "run.yaml"
        raw = plan(tmp_path / "out", **{"max_steps": 2, **changes})
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
        return str(path)

    return write


def reward(name: str, **options: Any) -> dict[str, Any]:
    return {"rewards": [{"name": f"{HERE}:{name}", **options}]}


# what is done: changes, exit code, and what the line on standard error says
TABLE: dict[str, tuple[dict[str, Any], int, str]] = {
    "a key that does not exist": ({"learn": {"learning_rte": 1.0}}, 2, "did you mean 'learning_rate'?"),
    "a piece that does not exist": ({"advantage": ["totl"]}, 2, "did you mean 'total'?"),
    "a reward of no weight": (reward("broken", weight=0), 2, "so there is nothing to learn from"),
    "a group of one": ({"rollout": {"num_generations": 1}}, 2, "ask for 2 or more"),
    "a missing reference": (
        {"objective": {"penalty": ["k3"]}},
        2,
        "add for instance `references: {ref: frozen}`",
    ),
    "a best model that is never measured": (
        {"metric_for_best_model": "eval_reward"},
        2,
        "must be a multiple of 'eval_steps' (0)",
    ),
    "an upload without a name": ({"push_to_hub": True}, 2, "wants 'hub_model_id' as owner/name, not ''"),
    "a reward that raises": (reward("broken"), 1, "raised LookupError: no span; prompt 'p"),
    "a reward that raises again": (reward("broken", retries=2), 1, "raised LookupError: no span"),
    "a reward that is NaN": (reward("undefined"), 1, "reward 'undefined' gave nan; prompt 'p"),
    "a reward that is infinite": (reward("endless"), 1, "reward 'endless' gave inf"),
    "too few rewards": (reward("too_few"), 1, "gave 1 numbers for 16 outcomes"),
    "a reward in words": (reward("in_words"), 1, "gave '0.5'"),
    "a reward that is too slow": (reward("late", timeout=0.02), 1, "no answer within 0.02 s"),
    "an asynchronous reward that fails": (reward("never"), 1, "raised TimeoutError: the judge is asleep"),
    "a server that is not there": (
        {"rewards": [{"name": "http", "url": "http://127.0.0.1:1/", "request_retries": 0}]},
        1,
        "'http://127.0.0.1:1/' does not answer within 60 s, asked 1 times",
    ),
    "an advantage piece that returns nothing": (
        {"advantage": ["total", "tests.training.test_advantage_chain:nothing"]},
        1,
        "advantage[1]: 'tests.training.test_advantage_chain.nothing' must return a reward table of the same "
        "16 rows, not",
    ),
    "an advantage piece that raises": (
        {"advantage": ["tests.training.test_advantage_chain:failing"]},
        1,
        "advantage[0]: 'tests.training.test_advantage_chain.failing' raised KeyError at step 0: 'iou'",
    ),
    "an advantage that is NaN": (
        {"advantage": ["total", "tests.training.test_advantage_chain:root", "group_normalize"]},
        1,
        "advantage[1]: 'tests.training.test_advantage_chain.root' made",
    ),
    "outcomes out of order": (
        {"rollout": {"engine": [f"{HERE}:Mute"]}},
        1,
        "must be in order, but their ends are [3, 1]",
    ),
    "a loss that is not finite": (
        {"objective": {"surrogate": f"{HERE}:divided_by_nothing"}},
        1,
        "the step was not taken, and its rows are in",
    ),
    "a gradient that is not finite": (
        {"objective": {"surrogate": f"{HERE}:kinked"}},
        1,
        "the gradient of step 0 has the norm nan",
    ),
    "no memory for a micro-batch": (
        {"policy": f"{HERE}:Crammed", "learn": {"micro_batch_steps": 16}},
        1,
        "(halved once already): CUDA out of memory. Tried to allocate 2.00 GiB. Set learn.micro_batch_",
    ),
    "no memory for rollouts": (
        {"rollout": {"engine": [f"{HERE}:Greedily"]}},
        1,
        "out of memory while making rollouts of step 0: CUDA out of memory. Let the engine hold fewer",
    ),
    "no question": (
        {"data": {"name": "tests.support.toys:prompts", "num": 0}},
        2,
        "'tests.support.toys:prompts' has no prompts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_a_fault_is_one_line_that_says_what_to_do(file, capsys, case):
    changes, code, message = TABLE[case]
    assert main(["train", file(**changes)]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in lines[0]
    assert message in lines[0]
    assert lines[0].startswith("error: " if code == 2 else "failed: ")


def test_the_documentation_lists_the_faults_with_their_messages():
    text = (ROOT / "docs" / "faults.md").read_text()
    told = dict(re.findall(r"^\| ([^|]+?) \| `+ ?([^|]+?) ?`+ \|", text, re.MULTILINE))
    assert set(told) >= set(TABLE), sorted(set(TABLE) - set(told))
    for case, (_, _, message) in TABLE.items():
        assert told[case] == message.replace("|", "\\|"), case
    assert len(TABLE) >= 20


# ---- numbers that are none


def left_in(folder: Path) -> dict[str, Any]:
    (path,) = sorted((folder / "faults").glob("*.json"))
    return json.loads(path.read_text())


def test_the_rows_to_blame_are_written_down_and_no_others(tmp_path):
    run = toy_run(tmp_path, objective={"surrogate": f"{HERE}:one_bad_row"}, rollout={"num_prompts": 8})
    with pytest.raises(
        NotFinite,
        match=r"of step 0 is not finite; the step was not taken, and its rows are in '.*step_000000",
    ):
        train(run)
    assert not run.policy.table.any()
    told = left_in(tmp_path)
    assert (told["step"], {row["prompt"] for row in told["rows"]}) == (0, {"p0"})
    assert 1 <= len(told["rows"]) <= 4
    assert told["rows"][0]["asked"] == "say 1"
    tensors = load_file(tmp_path / "faults" / told["tensors"])
    assert tensors["mask"].shape == tensors["logp"].shape == (len(told["rows"]), 4)
    assert tensors["notes/logp"].shape == tensors["logp"].shape
    for row, mask in zip(told["rows"], tensors["mask"], strict=True):
        assert row["length"] == int(mask.sum())
        assert len(row["answer"].split()) in (row["length"], row["length"] - 1), "without its stop"


def test_a_gradient_is_traced_to_its_rows_where_every_loss_is_finite(tmp_path):
    run = toy_run(tmp_path, objective={"surrogate": f"{HERE}:kinked"})
    with pytest.raises(NotFinite, match="the gradient of step 0 has the norm nan"):
        train(run)
    assert len(left_in(tmp_path)["rows"]) == 16


def test_a_step_may_be_skipped_and_the_run_goes_on(tmp_path, capsys):
    # Two groups a step of four prompts: every other step holds p0.
    changes = {
        "objective": {"surrogate": f"{HERE}:one_bad_row"},
        "rollout": {"num_prompts": 2},
        "data": {"name": "tests.support.toys:prompts", "num": 4},
        "sampler": {"name": "uniform", "shuffle": False},
        "max_steps": 4,
        "learn": {"on_nonfinite": "skip", "max_skipped": 2},
    }
    run = toy_run(tmp_path, **changes)
    run.report.console.quiet = False
    train(run)
    records = run.journal.read()
    assert [record.get("skipped_updates") for record in records] == [1, 1, 2, 2]
    assert ["loss" in record for record in records] == [False, True, False, True]
    assert all(math.isfinite(record["loss"]) for record in records[1::2])
    assert run.policy.table.isfinite().all() and not run.policy.table[0].any() and run.policy.table[2].any()
    assert "the step was skipped (2 of 2), its rows are in" in capsys.readouterr().out
    assert len(list((tmp_path / "faults").glob("*.json"))) == 2
    again = toy_run(tmp_path, **{**changes, "max_steps": 5})
    with pytest.raises(
        NotFinite, match="that is the 3. step that was not taken, and learn.max_skipped allows 2"
    ):
        train(again)


def test_a_skipped_step_leaves_the_optimizer_alone(tmp_path):
    changes = {
        "objective": {"surrogate": f"{HERE}:divided_by_nothing"},
        "learn": {"optimizer": "adamw", "on_nonfinite": "skip"},
        "references": {"slow": {"name": "ema", "decay": 0.5}},
    }
    run = toy_run(tmp_path, **changes, max_steps=2)
    train(run)
    assert not run.learner.optimizer.state_dict()["state"] and run.method.references["slow"].passed == 0


# ---- memory


def test_memory_that_runs_out_halves_the_micro_batch_once_and_changes_no_number(tmp_path, capsys):
    Full.sizes.clear()
    learn = {"optimizer": "sgd", "learning_rate": 1.0, "micro_batch_steps": 16}
    run = toy_run(tmp_path / "full", policy=f"{HERE}:Full", learn=learn, max_steps=1)
    run.report.console.quiet = False
    train(run)
    # 16 rows of 4 steps: four rows do not fit, two do.
    assert Full.sizes == [16] + [8] * 8
    said = capsys.readouterr().out
    assert said.count("learn.micro_batch_steps is halved from 16 to 8, and the step is taken again") == 1
    other = toy_run(tmp_path / "other", learn={**learn, "micro_batch_steps": 8}, max_steps=1)
    train(other)
    assert torch.equal(run.policy.table, other.policy.table)
    assert run.progress.reported["loss"] == other.progress.reported["loss"], "nothing of the first try counts"


def test_a_resumed_run_remembers_that_it_halved(tmp_path):
    changes = {"policy": f"{HERE}:Full", "learn": {"micro_batch_steps": 16}}
    train(toy_run(tmp_path, **changes, max_steps=1))
    Full.sizes.clear()
    run = toy_run(tmp_path, **changes, max_steps=2)
    train(run)
    assert run.learner.guard.micro_batch_steps == 8 and max(Full.sizes) == 8


def test_asking_other_policies_may_run_out_of_memory_as_well(tmp_path):
    Full.sizes.clear()
    run = toy_run(
        tmp_path, policy=f"{HERE}:Full", learn={"micro_batch_steps": 16, "num_iterations": 2}, max_steps=1
    )
    train(run)
    assert Full.sizes == [16] + [8] * 24, "old, and two passes"


def test_a_second_time_is_an_error(tmp_path):
    run = toy_run(tmp_path, policy=f"{HERE}:Full", learn={"micro_batch_steps": 32}, max_steps=1)
    with pytest.raises(OutOfMemory, match="with 16 steps in a micro-batch .halved once already.*=8 or less"):
        train(run)


def test_the_largest_micro_batch_comes_first():
    rows = [ToyText().encode(one, one.answers[0]) for one in prompts()[:5]]
    whole: Batch = ToyText().collate(tuple(rows))
    cuts = [whole.select(torch.arange(n)) for n in (1, 3, 2, 3)]
    assert [len(micro) for micro in largest_first(cuts)] == [3, 3, 2, 1]
    assert largest_first(cuts)[0] is cuts[1], "equal ones stay in order"


# ---- checkpoints of others


def test_a_checkpoint_of_another_run_is_refused_and_the_one_before_is_used(tmp_path, capsys):
    changes = {"save_steps": 1, "save_total_limit": 0}
    train(toy_run(tmp_path / "run", **changes, max_steps=2))
    other = {"references": {"slow": {"name": "ema", "decay": 0.5}}}
    train(toy_run(tmp_path / "other", **changes, **other, max_steps=1))
    shutil.copytree(tmp_path / "other" / "checkpoint-1", tmp_path / "run" / "checkpoint-9")
    run = toy_run(tmp_path / "run", **changes, max_steps=3)
    run.report.console.quiet = False
    assert resume(run) == 2
    said = capsys.readouterr().out
    assert "checkpoint-9' is a checkpoint of another run" in said
    assert "looking at the one before" in said


def test_weights_of_another_shape_are_refused_and_nothing_is_begun_anew(tmp_path):
    train(toy_run(tmp_path / "run", max_steps=1))
    folder = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / "model")
    ToyText(num=3).save(folder / "model")
    checkpoint.write_state(folder, checkpoint.read_state(tmp_path / "whole"))  # only the shape is wrong
    assert checkpoint.read_state(folder)["step"] == 1
    with pytest.raises(checkpoint.CheckpointError, match="can be used.* does not fit this run: Runtime"):
        resume(toy_run(tmp_path / "run", max_steps=2))


# ---- signals


def stopping(run: Run, number: int, times: int = 1) -> None:
    """Send signals to this process in the middle of the second step."""
    tick = run.tick

    def ticking(step: int) -> None:
        tick(step)
        if step == 1:
            for _ in range(times):
                os.kill(os.getpid(), number)

    run.tick = ticking


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves_it(tmp_path, number):
    whole = toy_run(tmp_path / "whole", max_steps=4)
    train(whole)
    run = toy_run(tmp_path / "run", max_steps=4)
    stopping(run, number)
    before = signal.getsignal(number)
    train(run)
    assert signal.getsignal(number) is before
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert not (tmp_path / "run" / "report.html").exists() and run.final is None
    again = toy_run(tmp_path / "run", max_steps=4)
    train(again)
    assert torch.equal(again.policy.table, whole.policy.table)


def test_a_second_signal_leaves_at_once(tmp_path):
    run = toy_run(tmp_path, max_steps=4)
    stopping(run, signal.SIGINT, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert not checkpoint.checkpoints(tmp_path) and len(run.journal.read()) == 1


def test_outside_of_the_main_thread_nobody_listens():
    import threading

    heard = []

    def other() -> None:
        with listening(True) as stop:
            heard.append(stop.asked)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert heard == [""]


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "code"), [([signal.SIGTERM], 0), ([signal.SIGINT] * 2, 130)])
def test_a_process_that_is_asked_to_stop(tmp_path, signals, code):
    path = tmp_path / "plan.yaml"
    slow = {"name": f"{HERE}:late", "weight": 1.0}
    path.write_text(json.dumps(plan(tmp_path / "run", max_steps=1000, rewards=[slow])))
    process = command("train", str(path))
    try:
        until = time.monotonic() + 600
        while not (tmp_path / "run" / "config.yaml").exists() and time.monotonic() < until:
            time.sleep(0.05)
        for number in signals:
            os.kill(process.pid, number)
            time.sleep(0.3)
        printed, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == code, printed
    saved = checkpoint.checkpoints(tmp_path / "run")
    assert bool(saved) == (code == 0)
    assert ("which is saved" in printed) == (code == 0)
    assert "once more to leave at once" in printed
