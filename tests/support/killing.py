"""Runs that are killed at random instants: `python -m tests.support.killing --kills 100 --runs usual`.

Every run is a process of its own that ends by SIGKILL: at a random time, in the middle of rollouts, of the
calls of tools, of a round of a game, of an update or of an evaluation, or before a random one of the file
operations by which it opens its folder, saves and writes its report. The same run is started again until it
is finished, and then compared with one that nobody disturbed: weights, state, metrics, completions and the
names of all files have to be the same bit for bit.
Ends with code 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Imported here and not in every process anew, because they take seconds.
import matplotlib.backends.backend_svg  # noqa: F401
import matplotlib.figure  # noqa: F401
import pandas  # noqa: F401 - pyarrow looks for it
import torch
import transformers
from pyarrow import parquet
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.config.registry import pieces
from mmrl.config.schema import Config, as_piece, parse
from mmrl.engines import play
from mmrl.reporting import html
from mmrl.reporting.methods import all_methods
from mmrl.reporting.metrics import Journal
from mmrl.runtime import checkpoint
from mmrl.training import evaluate, loop
from mmrl.training.loop import train
from mmrl.training.record import record_of
from mmrl.training.trainer import Run
from mmrl.vision.engines import with_tools
from tests.support.remembering import remembering
from tests.support.resuming import EVERYTHING, without_times
from tests.support.toy_flow import flow_plan
from tests.support.toys import plan
from tests.vision import tiny

OFTEN = {
    "save_steps": 1,
    "max_steps": 16,
    "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}},
    "eval_steps": 3,
    "report": {"trackers": [], "log_completions": True},
}
SEEN_ONCE = {"name": "tests.vision.mixed:pictured", "num": 1}
CLIMBING = [
    {"name": "vision.generate", "max_completion_length": 6},
    {"name": "tests.vision.playing:Playing", "environment": "tests.vision.playing:Ladder"},
]
GAME = [
    {"name": "vision.generate", "max_completion_length": 4},
    {"name": "play", "game": "tests.support.playing:Telephone"},
]


def parting(engine: str, reward: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    """Say what a run of conversations that part at their turns has; `reward` is of candidates."""
    talking = {"tool": ["vision.crop", "tests.vision.talking:slow"], "turn_outcomes": True}
    if reward:
        talking["reward"] = reward
    return {
        "policy": {"name": "vision.tokens", "dtype": "float32"},
        "data": "tests.vision.mixed:pictured",
        "rollout": {
            "engine": [
                {"name": "vision.generate", "max_completion_length": 6},
                {"name": f"tests.vision.parting:{engine}", **talking},
            ],
            "num_prompts": 1,
            "num_generations": 4,
        },
        "rewards": [{"name": "tests.vision.mixed:letters", "at": "every"}],
        "learn": {"learning_rate": 1e-3},
        **OFTEN,
        "evaluation": {"data": SEEN_ONCE},
        **changes,
    }


PLANS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "text": (
        plan,
        {
            "rollout": {"num_prompts": 3, "num_generations": 3, "max_rounds": 2},
            "group_filter": "varied",
            "advantage": ["total", "tests.support.toys:RunningMean", "group_normalize"],
            "objective": {"penalty": ["k3"]},
            "references": {"ref": "frozen", "slow": {"name": "ema", "decay": 0.5}},
            "learn": {"num_iterations": 2, "minibatches": 2, "optimizer": "muon"},
            **OFTEN,
        },
    ),
    "flow": (
        flow_plan,
        {
            "rollout": {"engine": ["tests.support.toy_flow:ToyDenoise", "tests.support.toy_flow:ToyProbes"]},
            "advantage": ["total", "turning_points", "group_normalize"],
            "objective": {
                "name": "policy_gradient",
                "surrogate": "clip",
                "aggregation": "step_mean",
                "penalty": [{"name": "gaussian_kl", "coef": 0.1}],
            },
            "references": {"ref": "frozen"},
            **OFTEN,
            "evaluation": {"data": "tests.support.toy_flow:spots"},
        },
    ),
    "vlm": (
        plan,
        {
            "policy": {"name": "vision.tokens", "dtype": "float32"},
            "data": "tests.vision.mixed:pictured",
            "rollout": {
                "engine": [
                    {"name": "vision.generate", "max_completion_length": 4},
                    {"name": "vision.with_entropy_temperature", "tau": 0.9},
                ],
                "num_prompts": 2,
            },
            "rewards": ["tests.vision.mixed:letters"],
            "learn": {"learning_rate": 1e-3},
            **OFTEN,
            "evaluation": {"data": SEEN_ONCE},
        },
    ),
    "conversation": (
        plan,
        {
            "policy": {"name": "vision.tokens", "dtype": "float32"},
            "data": "tests.vision.mixed:pictured",
            "rollout": {
                "engine": [
                    {"name": "vision.generate", "max_completion_length": 6},
                    {
                        "name": "tests.vision.talking:SlowlyTalkative",
                        "tool": ["vision.crop", "tests.vision.talking:slow"],
                        "turn_outcomes": True,
                    },
                ],
                "num_prompts": 2,
                "num_generations": 2,
            },
            "rewards": [{"name": "tests.vision.mixed:letters", "at": "every"}],
            "advantage": ["total", {"name": "gigpo", "same": ["place"]}],
            "learn": {"learning_rate": 1e-3},
            **OFTEN,
            "evaluation": {"data": SEEN_ONCE},
        },
    ),
    "tree": (plan, parting("Branching", advantage=["total", "tree_values"])),
    "candidates": (
        plan,
        parting(
            "Stepwise",
            reward=["tests.vision.mixed:letters"],
            rewards=[{"name": "precomputed", "key": "step_reward"}],
        ),
    ),
    "environment": (
        plan,
        {
            "policy": {"name": "vision.tokens", "dtype": "float32"},
            "data": "tests.vision.playing:seen",
            "rollout": {"engine": CLIMBING, "num_prompts": 1, "num_generations": 2},
            "rewards": [{"name": "precomputed", "key": "Ladder"}, "tests.vision.playing:rungs_left"],
            "learn": {"learning_rate": 1e-3},
            **OFTEN,
            "evaluation": {"data": {"name": "tests.vision.playing:seen", "count": 1}, "engine": CLIMBING},
        },
    ),
    "game": (
        plan,
        {
            "policy": {"name": "vision.tokens", "dtype": "float32"},
            "data": "tests.vision.mixed:pictured",
            "rollout": {"engine": GAME, "num_prompts": 1, "num_generations": 2},
            "rewards": [{"name": "precomputed", "key": "payoff", "label": "payoff", "at": "every"}],
            "advantage": ["total", {"name": "returns", "by": ["role"]}, "role_baseline"],
            "learn": {"learning_rate": 1e-3},
            **OFTEN,
            "evaluation": {"data": SEEN_ONCE, "engine": GAME},
        },
    ),
    "critic": (
        plan,
        {
            "advantage": ["total", {"name": "gae", "lam": 0.9}, "batch_normalize"],
            "references": {
                "ref": "frozen",
                "critic": {
                    "name": "second_model",
                    "policy": "tests.support.toys:ToyCritic",
                    "advantage": ["total", "lambda_returns"],
                    "objective": {"name": "value_regression", "cliprange_value": 0.5},
                    "minibatches": 2,
                    "learning_rate": 0.1,
                },
                "prm": {
                    "name": "second_model",
                    "advantage": ["total", "tests.support.toys:RunningMean"],
                    "objective": {"name": "comparison", "implicit_reward": "log_ratio", "compare": ["kto"]},
                    "learns_first": True,
                    "learning_rate": 0.05,
                },
            },
            **OFTEN,
        },
    ),
    "ahead": (  # with the rollouts of the next step in flight
        plan,
        {
            "rollout": {"engine": ["tests.training.test_ahead:Beginning"], "max_staleness": 1},
            "objective": {"step_weight": ["truncated_importance"]},
            "references": {"ref": "frozen", "slow": {"name": "ema", "decay": 0.5}},
            **OFTEN,
        },
    ),
    "pairs": (
        plan,
        {
            "data": {"name": "tests.support.toys:prompts", "answers": 2},
            "rollout": {"engine": ["offline"], "num_generations": 2},
            "advantage": ["total", "best_vs_worst"],
            "objective": {"name": "comparison", "implicit_reward": "log_ratio", "compare": ["sigmoid"]},
            "references": {"ref": "frozen"},
            **OFTEN,
        },
    ),
}

# With every sampler, and with every engine that has a memory.
REMEMBERING = {
    name: (plan, {**EVERYTHING, "save_steps": 1, **changes}) for name, changes in remembering().items()
}
RUNS = {"usual": PLANS, "remembering": REMEMBERING}


def left_out() -> set[str]:
    """Name registered samplers, and engines with a state, that no run here has."""
    changes = [changes for runs in RUNS.values() for _, changes in runs.values()]
    lists = [(run.get("sampler", ()), run.get("rollout", {}).get("engine", ())) for run in changes]
    here = {as_piece(piece, "").name for pair in lists for listed in pair for piece in listed}
    engines = [entry for entry in pieces("engine") if hasattr(entry.target, "state_dict")]
    return {entry.full_name for entry in (*pieces("sampler"), *engines)} - here


# Families of the models on disk.
MODELS = {
    "vlm": "llava",
    **dict.fromkeys(("conversation", "tree", "candidates", "environment", "game"), "qwen2_5_vl"),
}

DOING = (
    "starting", "opening", "rollout", "tools", "playing", "reward", "learn", "saving", "evaluating",
    "closing", "between",
)  # fmt: skip
BY_FILES = ("opening", "saving", "closing")  # killed before one of their file operations
WATCHED = ("rollout", "tools", "playing", "learn", "evaluating")  # killed soon after one of them began
SOON = 0.02  # seconds
SELDOM = ("tools", "playing")  # which not every run does
COUNTED = (*WATCHED, *BY_FILES)
PER_RUN = 4  # kills of one run
DRAWN: Counter[str] = Counter()  # how often each way to kill was drawn


class Shared:
    """What a run is doing, and how often it began a file operation or what is watched by then, seen by its
    parent as well."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8 * (1 + len(DOING)))
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.memory[:] = bytes(len(self.memory))

    def _get(self, place: int) -> int:
        return struct.unpack_from("q", self.memory, 8 * place)[0]

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("q", self.memory, 8 * place, value)

    @property
    def doing(self) -> str:
        """Name what the run does."""
        return DOING[self._get(0)]

    def counted(self, doing: str) -> int:
        """Give how many file operations of one kind of work there were, or how often it began."""
        return self._get(1 + DOING.index(doing))

    def count(self) -> int:
        """Count one more."""
        place = 1 + self._get(0)
        self._set(place, self._get(place) + 1)
        return self._get(place)

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Say what is done in a block."""
        before = self._get(0)
        self._set(0, DOING.index(doing))
        yield
        self._set(0, before)


SHARED = Shared()


# ---- a run in a process of its own


def begin(name: str, folder: Path, steps: int, kill: tuple[str, int] = ("", 0)) -> int:
    """Start a run of so many steps in a process of its own, and give its number. `kill` names work, and
    before which of its file operations the process ends itself."""
    sys.stdout.flush()
    SHARED.clear()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        html.pages.curves = lambda runs: []
        html.pages.frontier = html.pages.time_split = lambda runs: ""
        evaluate.RESAMPLES = 20
        run = build(planned(name, folder, steps), quiet=True)
        tell(run)
        count_files(kill)
        train(run)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def planned(name: str, folder: Path, steps: int) -> Config:
    """Write down a run. Its model, where it has one on disk, lies beside its folder."""
    make, changes = {**PLANS, **REMEMBERING}[name]
    if name in MODELS:
        changes = {**changes, "policy": {**changes["policy"], "model": str(folder.parent / "model")}}
    return parse(make(folder, **{**changes, "max_steps": steps}), Config)


def tell(run: Run) -> None:
    """Note what a run is doing."""
    timing = run.report.timing

    @contextmanager
    def told(name: str) -> Iterator[None]:
        with SHARED.during(name if name in DOING else SHARED.doing), timing(name):
            if name in WATCHED:
                SHARED.count()
            yield

    def noted(work: Callable, doing: str) -> Callable:
        def wrapper(*args: Any, **options: Any) -> Any:
            with SHARED.during(doing):
                if doing in WATCHED:
                    SHARED.count()
                return work(*args, **options)

        return wrapper

    SHARED._set(0, DOING.index("between"))
    run.report.timing = told
    loop.resume, loop.save = noted(loop.resume, "opening"), noted(loop.save, "saving")
    run.close, loop.publish = noted(run.close, "closing"), noted(loop.publish, "closing")
    with_tools.begin_calls = noted(with_tools.begin_calls, "tools")
    with_tools.WithTools._reply = noted(with_tools.WithTools._reply, "tools")
    play.Play._answer = noted(play.Play._answer, "playing")
    if run.evaluator:
        run.evaluator.measure = noted(run.evaluator.measure, "evaluating")


def count_files(kill: tuple[str, int]) -> None:
    """Count what a run does to files, and let it end by SIGKILL before the operation that was drawn."""
    doing, number = kill
    changes = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "fcntl.flock"}

    def look(event: str, args: tuple) -> None:
        here = SHARED.doing
        counts = here in BY_FILES and event in changes and not str(args[0]).endswith((".py", ".pyc"))
        if counts and SHARED.count() == number and here == doing:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    # What a killed process wrote is still there; waiting for the disk is for machines that lose power.
    os.fsync = lambda handle: look("open", ("fsync",))


# ---- killing


def finished(child: int, limit: float = 900.0) -> bool:
    """Wait for a process; tell whether it came to its end by itself."""
    until = time.monotonic() + limit
    while not (ended := over(child)):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"a run does not end within {limit:g} s")
        time.sleep(0.01)
    return ended == "finished"


def over(child: int) -> str:
    """Say how a process ended, and nothing while it goes on. One that has ended is not asked again."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended and os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a run failed that nobody killed")
    return "" if not ended else "finished" if os.WIFEXITED(status) else "killed"


def kill_once(
    name: str, folder: Path, steps: int, seconds: float, most: Mapping[str, int], draw: random.Random
) -> str:
    """Start a run and kill it somewhere; say what it was doing, and nothing where it was finished before."""
    ways = ("time", *(way for way in COUNTED if most[way]))
    # So that few kills are of all kinds.
    way = min(ways, key=lambda way: (DRAWN[way], way not in SELDOM, draw.random()))
    DRAWN[way] += 1
    # What comes late in a run is reached by runs that were killed before.
    number = draw.randint(1, max(1, 3 * most[way] // 4)) if way != "time" else 0
    child = begin(name, folder, steps, (way, number))
    if way in BY_FILES:
        return "" if finished(child) else SHARED.doing
    time.sleep(draw.uniform(0, 0.6 * seconds) if way == "time" else 0)
    while way in WATCHED and SHARED.counted(way) < number:
        if over(child):
            return ""
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, SOON) if way in WATCHED else 0)
    os.kill(child, signal.SIGKILL)
    return "" if finished(child) else SHARED.doing


def disturbed(
    name: str, folder: Path, steps: int, kills: int, draw_kill: Callable[[Path], str]
) -> Counter[str]:
    """Kill a run so often, start it again after each, and let it end; count what it was doing."""
    found: Counter[str] = Counter()
    for _ in range(kills):
        doing = draw_kill(folder)
        if not doing:
            break
        found[doing] += 1
    if not finished(begin(name, folder, steps)):
        raise RuntimeError("a run was killed by somebody else")
    return found


def undisturbed(name: str, folder: Path, steps: int) -> tuple[float, dict[str, int]]:
    """Let a run end; measure its seconds, and count its file operations and what else is counted."""
    began = time.monotonic()
    finished(begin(name, folder, steps))
    return time.monotonic() - began, {doing: SHARED.counted(doing) for doing in COUNTED}


# ---- comparing


def differences(one: Path, other: Path) -> list[str]:
    """Name what differs between two finished runs."""
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (one, other)]
    if names[0] != names[1]:
        return [f"which files there are ({', '.join(sorted(names[0] ^ names[1]))})"]
    said = []
    for name in sorted(names[0]):
        if name.endswith(".safetensors"):
            tensors = [bits_of(folder / name) for folder in (one, other)]
            same = tensors[0] == tensors[1]
        elif name.endswith(".parquet"):  # as text, because nothing equals NaN
            texts = [str(parquet.read_table(folder / name).to_pydict()) for folder in (one, other)]
            same = texts[0] == texts[1]
        else:
            found = [content(folder, name) for folder in (one, other)]
            same = found[0] == found[1]
        said += [] if same else [name]
    return said


def bits_of(path: Path) -> dict[str, tuple]:
    """Read the tensors of a file as bytes, so that NaN equals NaN."""
    return {
        name: (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in load_file(path).items()
    }


def content(folder: Path, name: str) -> str:
    """Read what has to be the same of a file, as text, because nothing equals NaN."""
    path = folder / name
    if name.endswith(".jsonl"):
        return str(without_times(Journal(folder, name).read()))
    if path.name == checkpoint.STATE:
        state = checkpoint.read_state(path.parent)
        return str([without_times([state["reported"]]), state["pieces"], state["best"], state["guard"]])
    if name == "evaluation.json":
        return str(without_times(json.loads(path.read_text()).values()))
    return ""


def compared(one: Path, other: Path) -> int:
    """Compare in a process of its own: readers start threads, and a process with threads must not be
    forked."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            said = differences(one, other)
            for what in said:
                print(f"{what} differs between '{one}' and '{other}'", flush=True)
            code = 2 if said else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """Kill runs of every kind as often; print for each what it was doing then."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="what to work in (default: a temporary one)")
    parser.add_argument("--kills", type=int, default=20, help="of all runs together")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--runs", choices=RUNS, default="usual", help="which; remembering: all that learn whom to ask"
    )
    parser.add_argument("--only", nargs="+", help="names of some of them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plans = given.only or RUNS[given.runs]
    all_methods()  # every process would read all files of methods
    with tempfile.TemporaryDirectory() as spare:
        folder = given.folder or Path(spare)
        wrong = sum(
            kill_often(name, folder / name, -(-given.kills // len(plans)), given.steps, given.seed)
            for name in plans
        )
    print(f"{wrong or 'no'} run{'' if wrong == 1 else 's'} ended otherwise than one that nobody killed")
    return int(wrong > 0)


def kill_often(name: str, folder: Path, kills: int, steps: int, seed: int) -> int:
    """Kill runs of one kind so often, and count those that did not end as one that nobody disturbed."""
    folder.mkdir(parents=True)
    if name in MODELS:
        transformers.utils.logging.disable_progress_bar()
        tiny.make(MODELS[name], folder / "model")
    config = planned(name, folder / "unused", steps)
    build(config, quiet=True)  # what is imported is shared
    record_of(config)  # and so are hashes of code
    seconds, most = undisturbed(name, folder / "whole", steps)
    draw, found, wrong, turn = random.Random(f"{seed} {name}"), Counter(), 0, 0
    kill = lambda run: kill_once(name, run, steps, seconds, most, draw)
    while found.total() < kills:
        run = folder / f"killed-{turn}"
        found += disturbed(name, run, steps, min(PER_RUN, kills - found.total()), kill)
        wrong += bool(compared(run, folder / "whole"))
        turn += 1
    shown = ", ".join(f"{doing} {found[doing]}" for doing in DOING if found[doing])
    told = f"{name}: {found.total()} kills of {turn} runs ({shown}), {seconds:.1f} s undisturbed"
    print(told, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
