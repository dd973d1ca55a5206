"""One command for a GPU: checks every claim that waits for one, part by part, into one JSON.

    python -m benchmarks.gpu [--toy] [--parts kernels decode] [--again] [--output FILE]

Every part is a process of its own with a limit of time, so that one that fails, crashes or runs out of memory
leaves the others alone; its error is written down, and the command ends with code 1. The file is written
after every part. Started again, it goes on with the parts that did not pass, unless the device, the size or
the code is another; `--again` takes all of them again. Without a GPU, or with `--toy`, every part
runs at a size for a CPU, which shows that it works and nothing about speed. vLLM is taken from the
environment that MMRL_VLLM names.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import PARTS, run_part
from benchmarks.machine import processor

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = "PART"  # before the JSON that a part prints last
# The most that a part may take on a GPU: 570 seconds in all, without vLLM.
SECONDS = {"kernels": 90, "grpo_step": 150, "memory": 160, "resume": 50, "vllm": 110}
USUAL_SECONDS = 60
TOY_SECONDS = 1800.0  # on a CPU that others use too


def machine(toy: bool) -> dict[str, Any]:
    """Name the device, and what it runs; parts that passed on the same are not taken again."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "memory_gb": round(torch.cuda.mem_get_info()[1] / 1e9, 1) if cuda else None,
        "size": "toy" if toy else "full",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "triton": version("triton"),
        "mmrl": code(),
    }


def version(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code() -> str:
    """Name the code that runs: its commit and a hash of later changes, or its version without git."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout

    try:
        commit, changes = git("rev-parse", "HEAD").decode().strip(), git("diff", "HEAD", "--", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('mmrl')}"
    return commit + (f" changed {hashlib.sha256(changes).hexdigest()[:12]}" if changes else "")


def take(name: str, toy: bool, limit: float) -> dict[str, Any]:
    """Run a part in a process of its own; what goes wrong becomes its result."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, *(["--toy"] if toy else [])]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what it started, such as vLLM
            process.communicate()
            return {"status": "failed", "error": f"it took longer than {limit:g} seconds"}
    _, mark, told = printed.rpartition(MARK)
    if process.returncode or not mark:
        return {"status": "failed", "error": errors[-3000:], "code": process.returncode}
    return json.loads(told)


def known(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """Read the parts that an earlier start on the same machine finished."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    return before["parts"] if before["machine"] == here else {}


def take_all(names: list[str], toy: bool, path: Path, again: bool) -> bool:
    """Take the parts that have not passed, write the file after each, and return whether none failed."""
    here = machine(toy)
    parts = {} if again else known(path, here)
    for name in names:
        if parts.get(name, {}).get("status") == "passed":
            print(f"{name}: passed before", flush=True)
            continue
        parts[name] = found = take(name, toy, TOY_SECONDS if toy else SECONDS.get(name, USUAL_SECONDS))
        print(f"{name}: {json.dumps(found)}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(path.name + ".part")
        written.write_text(json.dumps({"machine": here, "parts": parts}, indent=2) + "\n")
        written.replace(path)
    return not any(part["status"] == "failed" for part in parts.values())


def main() -> int:
    """Take the parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS), help="run this one here, and print its result")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    toy = given.toy or not torch.cuda.is_available()
    if given.part:
        print(MARK + json.dumps(run_part(given.part, toy)))
        return 0
    path = given.output or RESULTS / ("gpu_toy.json" if toy else "gpu.json")
    return 0 if take_all(given.parts, toy, path, given.again) else 1


if __name__ == "__main__":
    sys.exit(main())
