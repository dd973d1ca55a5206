"""Runs that are killed outright at random instants: `python -m tests.killing folder --kills 20`.

Every run is a process of its own that is sent SIGKILL: while it makes rollouts, scores, learns or saves. The
same run is started again until it is finished, and then compared with one that nobody disturbed: weights,
state, metrics and completions have to be the same bit for bit. Ends with code 1 where they are not.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import parquet
from safetensors.torch import load_file

from mmrl import checkpoint, page
from mmrl.build import build
from mmrl.config import Config, parse
from mmrl.report import Journal
from mmrl.run import Run
from mmrl.train import train
from tests.toy_flow import flow_plan
from tests.toys import plan

OFTEN = {"save_steps": 2, "max_steps": 16, "report": {"trackers": [], "log_completions": True}}
PLANS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "text": (
        plan,
        {
            "rollout": {"num_prompts": 3, "num_generations": 3, "max_rounds": 2},
            "group_filter": "varied",
            "advantage": ["total", "tests.toys:RunningMean", "group_normalize"],
            "objective": {"penalty": ["k3"]},
            "references": {"ref": "frozen", "slow": {"name": "ema", "decay": 0.5}},
            "learn": {"num_iterations": 2, "minibatches": 2, "optimizer": "muon"},
            **OFTEN,
        },
    ),
    "image": (
        flow_plan,
        {
            "rollout": {"engine": ["tests.toy_flow:ToyDenoise", "tests.toy_flow:ToyProbes"]},
            "advantage": ["total", "turning_points", "group_normalize"],
            "objective": {
                "name": "policy_gradient",
                "surrogate": "clip",
                "aggregate": "step_mean",
                "penalty": [{"name": "gaussian_kl", "coef": 0.1}],
            },
            "references": {"ref": "frozen"},
            **OFTEN,
        },
    ),
    "pair": (
        plan,
        {
            "data": {"name": "tests.toys:prompts", "answers": 2},
            "rollout": {"engine": ["stored"], "num_generations": 2},
            "advantage": ["total", "best_vs_worst"],
            "objective": {"name": "comparison", "gain": "log_ratio", "compare": ["sigmoid"]},
            "references": {"ref": "frozen"},
            **OFTEN,
        },
    ),
}


def begin(name: str, folder: Path, steps: int) -> int:
    """Start a run of so many steps in a process of its own, and give its number."""
    sys.stdout.flush()
    HERE[0] = 0
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        page.curves = lambda runs: []
        # What a killed process wrote is still there; waiting for the disk is for machines that lose power.
        os.fsync = lambda handle: None
        make, changes = PLANS[name]
        run = build(parse(make(folder, **{**changes, "max_steps": steps}), Config), quiet=True)
        tell(run)
        train(run)
        code = 0
    finally:
        os._exit(code)


DOING = ("starting", "rollout", "reward", "learn", "save", "between")
HERE = mmap.mmap(-1, 1)  # what the child does, seen by both


def tell(run: Run) -> None:
    """Note what a run is doing."""
    timing, save = run.timing, run.save

    @contextmanager
    def told(name: str) -> Iterator[None]:
        HERE[0] = DOING.index(name) if name in DOING else len(DOING) - 1
        with timing(name):
            yield
        HERE[0] = len(DOING) - 1

    def saving(step: int) -> None:
        HERE[0] = DOING.index("save")
        save(step)
        HERE[0] = len(DOING) - 1

    run.timing, run.save = told, saving


def finished(child: int, limit: float = 300.0) -> bool:
    """Wait for a process; tell whether it came to its end by itself."""
    until, (ended, status) = time.monotonic() + limit, (0, 0)
    while not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"a run does not end within {limit:g} s")
        time.sleep(0.01)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a run failed that nobody killed")
    return os.WIFEXITED(status)


def disturbed(
    name: str, folder: Path, steps: int, longest: float, kills: int, draw: random.Random
) -> Counter[str]:
    """Kill a run so often, start it again after each, and let it end; count what it was found doing."""
    found: Counter[str] = Counter()
    for _ in range(kills):
        child = begin(name, folder, steps)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        if finished(child):
            break
        found[DOING[HERE[0]]] += 1
    if not finished(begin(name, folder, steps)):
        raise RuntimeError("a run was killed by somebody else")
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Name what differs between two finished runs."""
    said = []
    last = [checkpoint.checkpoints(folder)[0] for folder in (one, other)]
    if last[0].name != last[1].name:
        return [f"{last[0].name} and {last[1].name}"]
    for name in (checkpoint.TENSORS, "model/model.safetensors"):
        tensors = [load_file(folder / name) for folder in last]
        if tensors[0].keys() != tensors[1].keys() or any(
            not tensors[0][key].equal(tensors[1][key]) for key in tensors[0]
        ):
            said.append(name)
    states = [checkpoint.read_state(folder) for folder in last]
    if str(states[0]["pieces"]) != str(states[1]["pieces"]):
        said.append("the memory of pieces")
    if untimed(one) != untimed(other):
        said.append("metrics.jsonl")
    names = [{path.name for path in (folder / "completions").iterdir()} for folder in (one, other)]
    if names[0] != names[1]:
        said.append("which completions there are")
    for name in sorted(names[0] & names[1]):
        tables = [parquet.read_table(folder / "completions" / name) for folder in (one, other)]
        if not tables[0].equals(tables[1]):
            said.append(name)
    return said


def compared(one: Path, other: Path) -> int:
    """Compare in a process of its own: readers start threads, and a process with threads must not be
    forked."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        said = differences(one, other)
        for what in said:
            print(f"{what} differs between '{one}' and '{other}'", flush=True)
        os._exit(2 if said else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def untimed(folder: Path) -> list[str]:
    """Read the journal without times; as text, because nothing equals NaN."""
    return [
        str({name: value for name, value in record.items() if "time" not in name})
        for record in Journal(folder).read()
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=6, help="of each kind of run")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, wrong = random.Random(given.seed), 0
    for make, changes in PLANS.values():
        build(
            parse(make(given.folder / "unused", **changes), Config), quiet=True
        )  # what is imported is shared
    for name in PLANS:
        began = time.monotonic()
        finished(begin(name, given.folder / name / "whole", given.steps))
        seconds = time.monotonic() - began
        found: Counter[str] = Counter()
        for turn in range(3 * given.kills):
            if found.total() >= given.kills:
                break
            folder = given.folder / name / f"killed-{turn}"
            found += disturbed(name, folder, given.steps, 0.8 * seconds, given.kills - found.total(), draw)
            wrong += compared(folder, given.folder / name / "whole")
        print(f"{name}: {found.total()} kills ({dict(found)}), {seconds:.1f} s undisturbed", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
