"""The measurement of rollouts: turns, rates, and the processor time of processes that others began."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.generate import Asked, Took, by_engine, images, measure, report, with_server
from benchmarks.vllm_servers import family, kill, processor_seconds
from mmrl.core.rng import Stream
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.policies.tokens import Tokens

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {BUSY + "time.sleep(60)"!r}])
print(child.pid, flush=True)
time.sleep(60)
"""


def wait(done):
    for _ in range(400):
        if done():
            return
        time.sleep(0.05)
    raise TimeoutError


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_is_counted_and_killed_with_those_that_it_began():
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    pids = family(process.pid)
    assert pids == {process.pid, child}
    wait(lambda: processor_seconds({child}) >= 0.3)
    assert processor_seconds(pids) >= 0.3
    kill(process)
    wait(lambda: not alive(child))


@pytest.mark.slow
def test_libraries_take_turns_at_the_same_images_and_the_first_round_is_not_counted():
    asked: list[tuple[str, Asked]] = []

    def library(name):
        def answer(about: Asked) -> Took:
            asked.append((name, about))
            return Took(len(asked), 0.0)

        return answer

    taken = measure({"mmrl": library("mmrl"), "other": library("other")}, 64, 2, [4, 8], 2)
    assert [name for name, _ in asked] == ["mmrl", "other"] * 5
    assert [about.new for _, about in asked[::2]] == [4, 4, 8, 4, 8]
    assert asked[2][1] == asked[3][1]
    assert len({about.seed for _, about in asked}) == 5
    assert [took.seconds for took in taken["other"][4]] == [4, 8]


def test_rates_are_by_the_clock_and_ratios_within_a_turn():
    taken = {
        "mmrl": {4: [Took(1.0, 0.5), Took(3.0, 0.5), Took(2.0, 0.5)], 8: [Took(4.0, 1.0)] * 3},
        "other": {4: [Took(2.0, 9.0), Took(3.0, 9.0), Took(8.0, 9.0)], 8: [Took(8.0, 9.0)] * 3},
    }
    line = report(taken, {"mmrl": 7.0}, visual=64, prompts=2, new=4)
    assert line["mmrl"]["tokens_per_second"] == 8 * 2 * 4 / 2.0
    assert line["mmrl"]["step_ms"] == 1e3 * (4.0 - 2.0) / 4
    assert line["mmrl"]["operators_of_step"] == 7
    assert line["other"]["mmrl_times_faster"] == 2.0  # the median of 2, 1 and 4
    assert line["other"]["processor_seconds"] == [9.0] * 3


def test_the_work_of_a_server_is_counted_with_its_clients():
    process = subprocess.Popen(
        [sys.executable, "-c", "input()\n" + BUSY + "print(1, flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def client(asked: Asked) -> Took:
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        return Took(5.0, 1.0)

    took = with_server(client, {process.pid})(Asked(64, 1, 0, 8))
    kill(process)
    assert took.seconds == 5.0
    assert took.processor == pytest.approx(1.3, abs=0.1)


@pytest.mark.slow
def test_the_turns_of_a_conversation_have_equal_lengths_and_see_a_half_more_each(tmp_path):
    TinyQwen2_5Vl(stream=Stream(0), max_pixels=64 * 28 * 28).build(tmp_path / "model")
    policy = Tokens(model=str(tmp_path / "model"), dtype="float32")
    policy.prompt_encoder.end = []
    rows, engine = [], Generate(policy, stream=Stream(0))
    rollout = by_engine(engine, 4)
    collate = WithTools.end

    def noted(self, talks):
        rows.extend(collate(self, talks))
        return tuple(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WithTools, "end", noted)
        rollout(images(16, 1, 0), 8)
    assert len(rows) == 8
    for row in rows:
        assert row.length == 8 and len(row.shown) == 3
        assert row.steps.suffix.media["image_grid_thw"].tolist() == [[1, 8, 4]] * 3
