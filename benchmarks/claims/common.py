"""Shared code of `benchmarks.claims`: stored runs, paired intervals and the files of `docs/claims.md`.

A run of a seed is a dictionary `{"seed", "answers": {measure: {uid: value}}, "seconds"}`: one value for every
held-out prompt. All runs of a script have the same seeds and held-out prompts, so differences are paired.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.samplers import gap
from mmrl.build import build, load_evaluator
from mmrl.config.binding import Pieces
from mmrl.config.loading import merge
from mmrl.config.schema import BuildConfig, Config, EvaluateConfig, load
from mmrl.core.rng import Stream
from mmrl.training.loop import train

RESULTS = Path(__file__).parents[1] / "results"
REPORT = {"trackers": [], "log_completions": False, "media_log_steps": 0, "startup_checks": []}
PILOT = 100  # seed at which rates are chosen, and of imitation that all seeds share
Run = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper claims, and where and how the claim is tested; all written before the first run.

    Args:
        method: Name of the method, as in the table.
        baseline: Name of the row that gains are against.
        claim: The paper's claim, with its source.
        situation: The situation that was built.
        measure: What is measured on held-out prompts, and what counts as the claim appearing.
    """

    method: str
    baseline: str
    claim: str
    situation: str
    measure: str


def options(
    name: str, doc: str | None, arguments: Sequence[str] | None = None, pilot: bool = False
) -> argparse.Namespace:
    """Parse `--seeds`, `--runs`, `--output` and `--quick` of a script; one thread, no progress bars.

    With `--quick` there is one seed, and both folders are away from the results. `pilot` adds `--pilot`.
    """
    from transformers.utils import logging

    parser = argparse.ArgumentParser(
        prog=f"benchmarks.claims.{name}", description=(doc or "").split("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/claims") / name, help="folder of the runs")
    parser.add_argument("--output", type=Path, default=None, help="JSON file of the table")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of one seed; leaves the results alone"
    )
    if pilot:
        parser.add_argument("--pilot", action="store_true", help=f"compare rates at seed {PILOT} alone")
    given = parser.parse_args(arguments)
    if given.quick:
        given.seeds, given.runs = given.seeds[:1], given.runs.with_name(f"{given.runs.name}_quick")
    given.output = given.output or (given.runs if given.quick else RESULTS) / f"claims_{name}.json"
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return given


def once(path: Path, run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Read a finished run, or run it, add its processor `seconds`, and write it."""
    if not path.exists():
        began = time.process_time()
        done = {**run(), "seconds": round(time.process_time() - began, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(done) + "\n")
    return json.loads(path.read_text())


def value(run: Run, measure: str) -> float:
    """Average a measure over the held-out prompts of a run."""
    return mean(run["answers"][measure].values())


def row(name: str, runs: Sequence[Run], base: Sequence[Run], measure: str) -> dict[str, Any]:
    """Give a row of the table: mean, value of every seed, and the paired gain with its 95 % interval."""
    of = [[{"answers": run["answers"][measure]} for run in some] for some in (runs, base)]
    return {
        "name": name,
        "measure": measure,
        "mean": round(mean(value(run, measure) for run in runs), 4),
        "by_seed": [round(value(run, measure), 4) for run in runs],
        "gain": gap(*of),
    }


def outcome(gain: Sequence[float]) -> str:
    """Name what an interval says: "appears", "does not appear", or "the opposite appears"."""
    _, low, high = gain
    return "appears" if low > 0 else "the opposite appears" if high < 0 else "does not appear"


def leave(
    given: argparse.Namespace,
    claim: Claim,
    start: float,
    rows: Sequence[Mapping[str, Any]],
    verdict: str,
    runs: Sequence[Run],
) -> dict[str, Any]:
    """Write and print the result of a script; `runs` are all runs, whose seconds are added."""
    found = {
        **asdict(claim),
        "start": round(start, 4),
        "rows": list(rows),
        "seeds": given.seeds,
        "verdict": verdict,
        "command": f"python -m benchmarks.claims.{given.output.stem.removeprefix('claims_')}",
        "seconds": round(sum(run["seconds"] for run in runs), 1),
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"rows": found["rows"], "verdict": verdict, "seconds": found["seconds"]}, indent=1))
    return found


# ---- models


def policy(model: Path) -> dict[str, Any]:
    """Name a model of which everything is trained."""
    return {"name": "vision.tokens", "model": str(model), "dtype": "float32", "freeze_vision_tower": False}


def imitation(steps: int, rate: float, prompts: int = 64) -> dict[str, Any]:
    """Settings of supervised fine-tuning with Muon, at a rate that falls to a twentieth."""
    falling = {"name": "linear", "start": rate, "end": rate / 20, "steps": steps}
    return {
        "include": ["methods/grpo/supervised.yaml"],
        "rollout": {"num_prompts": prompts},
        "learn": {"learning_rate": falling, "optimizer": "muon", "micro_batch_steps": 65536},
        "max_steps": steps,
    }


def built(builder: Mapping[str, Any], folder: Path, seed: int = 0) -> Path:
    """Build a model or rows into a folder, unless they are there; return the folder."""
    if not folder.exists():
        wanted = load({"build": dict(builder), "output": str(folder), "seed": seed}, kind=BuildConfig)
        Pieces(Stream(seed)).make("builder", wanted.build).build(folder)
    return folder


def trained(raw: Mapping[str, Any], folder: Path) -> Path:
    """Train a run to its end, from where it was killed; return the folder of its last model."""
    model = folder / f"checkpoint-{raw['max_steps']}" / "model"
    if not model.exists():
        raw = merge({"save_steps": 1_000_000, "save_total_limit": 1}, raw)
        train(build(load({**raw, "output_dir": str(folder)}, kind=Config), quiet=True))
    return model


def answered(
    model: Path, data: Mapping[str, Any], rewards: Sequence[Any], longest: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Answer held-out prompts greedily; return all rewards, and the number of `tokens`, by prompt."""
    engine = {"name": "vision.generate", "max_completion_length": longest, "temperature": 0.0}
    evaluation = {"data": dict(data), "engine": [{**engine, "batch_size": 64}], "rewards": list(rewards)}
    config = {"policy": policy(model), "evaluation": evaluation, "output_dir": str(folder)}
    table = load_evaluator(load(config, kind=EvaluateConfig)).measure().table
    values = {name: table.at_end(name).tolist() for name in table.scored} | {"tokens": table.length.tolist()}
    return {name: dict(zip(table.uids, column, strict=True)) for name, column in values.items()}
