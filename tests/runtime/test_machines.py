"""Two machines train as one; one that is gone is named on the other, and the run goes on elsewhere."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.reporting.metrics import Journal
from mmrl.runtime.links import Links
from mmrl.training.loop import train
from tests.runtime.test_real_processes import SPEAKING, assert_same_files, on_processes
from tests.support.distributed_worker import launch
from tests.support.machines import accelerate, torchrun, two_machines, unable
from tests.support.resuming import without_times
from tests.support.toys import plan
from tests.vision import tiny

reason = unable() if os.environ.get("RANK") is None else ""
needs_machines = pytest.mark.skipif(bool(reason), reason=reason or "two machines")
WORKER = "tests.support.distributed_worker"


def plan_of(folder, how="killed"):
    return plan(
        folder / "run",
        policy={"name": "tests.support.toys:ToyText", "double": True},
        rewards=[
            "tests.support.toys:share_right",
            {"name": "tests.support.machines:Dying", "how": how, "once": str(folder / "once"), "weight": 0.0},
        ],
        learn={"optimizer": "sgd", "learning_rate": 0.5},
        rollout={"num_prompts": 5},
        max_steps=6,
        save_steps=2,
    )


def journal(folder):
    return str(without_times(Journal(folder / "run").read()))


def weights(folder, name="weights-0"):
    return load_file(folder / "run" / name / "model.safetensors")["table"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train on two processes of one machine."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "once").touch()
    launch([plan_of(folder)], folder)
    return folder


def write(folder, **changes):
    listed = folder / "plans.json"
    listed.write_text(json.dumps([plan_of(folder, **changes)]))
    return str(listed)


@pytest.mark.slow
@needs_machines
def test_two_machines_train_as_two_processes_of_one(undisturbed, tmp_path):
    (tmp_path / "once").touch()
    listed = write(tmp_path)
    with two_machines() as machines:
        started = [machines.start(i, accelerate(i, WORKER, listed)) for i in range(2)]
        printed = [machines.wait(i) for i in range(2)]
    assert not any(process.returncode for process in started), printed
    assert journal(tmp_path) == journal(undisturbed)
    for rank in range(2):
        assert torch.equal(weights(tmp_path, f"weights-{rank}"), weights(undisturbed))


@pytest.mark.slow
@needs_machines
@pytest.mark.parametrize(
    "how, said",
    [
        ("killed", "its process ended without a word, as one that is killed does"),
        ("unplugged", "no sign of its machine: "),
    ],
)
def test_a_machine_that_is_gone_is_named_and_the_run_goes_on_with_one_process(
    how, said, undisturbed, tmp_path
):
    listed = write(tmp_path, how=how)
    with two_machines() as machines:
        started = [machines.start(i, torchrun(i, WORKER, listed)) for i in range(2)]
        until = time.monotonic() + 600
        while not (tmp_path / "once").exists() and time.monotonic() < until:
            assert started[0].poll() is None, machines.printed(0)
            time.sleep(0.1)
        gone = time.monotonic()
        if how == "unplugged":
            machines.unplug()
        printed = machines.wait(0, timeout=300)
    told = tmp_path / "run" / "failed-0"  # where the main thread was not waiting for the other machine
    words = printed + (told.read_text() if told.exists() else "")
    assert f"ProcessFailed: process 1 of 2 (on machine1, 10.97.41.2) is gone: {said}" in words
    assert started[0].returncode
    assert said and time.monotonic() - gone < 240  # the launcher takes its time after the process has ended
    named = told.stat().st_mtime if told.exists() else None
    assert named is None or named - (tmp_path / "once").stat().st_mtime < 120
    (tmp_path / "run" / "failed-0").unlink(missing_ok=True)
    run = build(parse(plan_of(tmp_path, how=how), Config), quiet=True)
    train(run)
    steps = run.journal.read()
    assert [record["step"] for record in steps] == [*range(6)]
    torch.testing.assert_close(run.policy.table.data, weights(undisturbed), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@needs_machines
def test_torchrun_starts_the_processes_again_and_they_go_on(undisturbed, tmp_path):
    listed = write(tmp_path)
    with two_machines() as machines:
        one_store_a_round = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [torchrun(i, WORKER, listed, restarts=1) for i in range(2)]
        started = [machines.start(i, command[i], **one_store_a_round) for i in range(2)]
        printed = [machines.wait(i) for i in range(2)]
    assert not any(process.returncode for process in started), printed
    assert (tmp_path / "once").exists()
    assert journal(tmp_path) == journal(undisturbed)
    assert torch.equal(weights(tmp_path), weights(undisturbed))


@pytest.mark.slow
@needs_machines
def test_shards_of_two_machines_are_those_of_two_processes_of_one(tmp_path):
    tiny.make("qwen2_5_vl", tmp_path / "model")
    policy = {"name": "vision.tokens", "model": str(tmp_path / "model"), "dtype": "float32"}
    usual = {**SPEAKING, "policy": policy, "max_steps": 2}
    one, two = ({**usual, "output_dir": str(tmp_path / name)} for name in ("one", "two"))
    printed, ended = on_processes([one], tmp_path, "fsdp2")
    assert ended, printed
    listed = tmp_path / "plans.json"
    listed.write_text(json.dumps([two]))
    worker = "tests.support.real_worker", str(listed), "fsdp2"
    with two_machines() as machines:
        started = [machines.start(i, torchrun(i, *worker)) for i in range(2)]
        printed = [machines.wait(i) for i in range(2)]
    assert not any(process.returncode for process in started), printed
    steps, wanted = (without_times(Journal(tmp_path / name).read()) for name in ("two", "one"))
    assert str(steps) == str(wanted) and len(steps) == 2
    assert_same_files(tmp_path / "one", tmp_path / "two", "checkpoint-2/**/*.safetensors")


# ---- links


def links_of(world, lost):
    """Connect processes of a test, which are threads here."""
    import threading

    gathered: list[bytes] = [b""] * world
    barrier, made = threading.Barrier(world), [None] * world

    def make(rank):
        def exchange(data):
            gathered[rank] = data
            barrier.wait(300)
            return list(gathered)

        made[rank] = Links(rank, world, exchange, lambda words: lost.append((rank, words)))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return made


def soon(condition):
    until = time.monotonic() + 120
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_a_process_that_says_farewell_is_not_missed():
    lost = []
    for link in reversed(links_of(3, lost)):
        link.close()
    time.sleep(0.2)
    assert not lost


def test_one_that_ends_without_a_word_is_missed_by_process_0():
    lost = []
    links = links_of(3, lost)
    links[2].over = True
    links[2].sockets[0].shutdown(2)
    assert soon(lambda: lost)
    assert [(rank, words[:15]) for rank, words in lost] == [(0, "process 2 of 3 ")]
    links[0].over = True
    for one in links[0].sockets:
        one.shutdown(2)
    assert soon(lambda: len(lost) == 2) and lost[1][0] == 1 and lost[1][1].startswith("process 0 of 3 (on ")
