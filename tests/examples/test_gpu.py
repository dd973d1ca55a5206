"""The command that checks what only a GPU can show: each part by itself, written down, taken up again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import PARTS, Claim, Skipped, run_part
from tests.support.fork_server import server

ROOT = Path(__file__).parents[2]


def test_a_claim_holds_up_to_its_threshold_and_never_for_nan():
    assert Claim("gap", 1.0, 1.0).holds and not Claim("gap", 1.1, 1.0).holds
    assert Claim("ratio", 1.1, 1.0, at_least=True).holds and not Claim("ratio", 0.9, 1.0, at_least=True).holds
    assert not Claim("gap", math.nan, 1.0).holds and not Claim("ratio", math.nan, 1.0, at_least=True).holds
    assert str(Claim("ratio", 2.0, 1.0, at_least=True)) == "ratio 2 >= 1"


def test_a_part_passes_fails_or_is_skipped(monkeypatch):
    def refuse(toy):
        raise Skipped("no such thing here")

    parts = {
        "good": lambda toy: ({"toy": toy}, [Claim("gap", 0.0, 1.0)]),
        "bad": lambda toy: ({}, [Claim("gap", 0.0, 1.0), Claim("ratio", 0.5, 1.0, at_least=True)]),
        "absent": refuse,
    }
    monkeypatch.setattr(gpu_parts, "PARTS", parts)
    good, bad, absent = (run_part(name, True) for name in parts)
    assert (
        good["status"] == "passed"
        and good["figures"] == {"toy": True}
        and good["claims"] == {"gap 0 <= 1": True}
    )
    assert bad["status"] == "failed" and bad["claims"]["ratio 0.5 >= 1"] is False
    assert absent == {"status": "skipped", "reason": "no such thing here"}


def test_a_failed_part_is_written_down_the_others_go_on_and_passed_ones_stand(tmp_path, monkeypatch, capsys):
    path, taken = tmp_path / "gpu.json", []
    results = {"kernels": {"status": "passed"}, "decode": {"status": "failed", "error": "out of memory"}}

    def take(name, toy, limit):
        taken.append(name)
        return results.get(name, {"status": "skipped", "reason": "not installed"})

    monkeypatch.setattr(gpu, "take", take)
    monkeypatch.setattr(gpu, "machine", lambda toy: {"device": "a device", "size": "toy"})
    names = ["kernels", "decode", "vllm"]
    assert not gpu.take_all(names, True, path, again=False)
    written = json.loads(path.read_text())
    assert written["machine"]["device"] == "a device" and taken == names
    assert written["parts"]["decode"]["error"] == "out of memory"
    results["decode"] = {"status": "passed"}
    assert gpu.take_all(names, True, path, again=False)
    assert taken == [*names, "decode", "vllm"]
    assert gpu.take_all(names, True, path, again=True)
    assert taken == [*names, "decode", "vllm", *names]
    # Another device has to show everything anew.
    monkeypatch.setattr(gpu, "machine", lambda toy: {"device": "another", "size": "toy"})
    assert gpu.take_all(["kernels"], True, path, again=False)
    assert taken[-1] == "kernels" and len(taken) == 9


@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [
        ("import sys; sys.exit('it broke')", 60.0, "it broke"),
        ("import time; time.sleep(60)", 0.5, "longer than 0.5"),
    ],
)
def test_a_part_that_breaks_or_hangs_is_an_error(monkeypatch, code, limit, said):
    plain = subprocess.Popen
    monkeypatch.setattr(
        gpu.subprocess, "Popen", lambda command, **options: plain([sys.executable, "-c", code], **options)
    )
    found = gpu.take("kernels", True, limit)
    assert found["status"] == "failed" and said in found["error"]


def test_all_parts_together_take_less_than_ten_minutes():
    assert sum(gpu.SECONDS.get(name, gpu.USUAL_SECONDS) for name in PARTS if name != "vllm") <= 570


def test_a_machine_without_triton_has_a_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # an import raises
    monkeypatch.setattr(gpu, "version", lambda package: None)
    assert gpu.machine(True)["triton"] is None


def test_parts_are_taken_again_after_the_code_changed(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert gpu.code().startswith("version ")  # no repository
    git("init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", "code.py")
    git("commit", "-qm", "one")
    names = [gpu.code()]
    for number in (2, 3):
        (tmp_path / "code.py").write_text(f"a = {number}\n")
        names.append(gpu.code())
    git("commit", "-qam", "two")
    names.append(gpu.code())
    assert len({*names}) == 4
    (tmp_path / "gpu.json").write_text("{}")  # results are no code
    assert gpu.code() == names[-1]


BEGUN = "kernels"  # as the command begins a part; the others are forked


def fork(name):
    """Run a part by the same command, in a process whose libraries are imported already."""
    environment = os.environ if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    process = server(0).fork(gpu.__name__, ["--part", name, "--toy"], environment)
    printed, _ = process.communicate(timeout=gpu.TOY_SECONDS)
    assert not process.returncode, printed
    return json.loads(printed.rpartition(gpu.MARK)[2].splitlines()[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_runs_on_a_cpu_at_toy_size(name):
    found = gpu.take(name, True, gpu.TOY_SECONDS) if name == BEGUN else fork(name)
    assert found["status"] in ("passed", "skipped"), found
    if found["status"] == "passed":
        assert found["claims"] and found["figures"]
