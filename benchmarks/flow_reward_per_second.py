"""Reward against seconds and against network evaluations: Flow-GRPO, TP-GRPO and AWM from one start.

    python -m benchmarks.flow_reward_per_second [--seeds 0 1 2] [--output runs/demo-image] [key=value ...]

Trains the three methods of `make demo-image` by their own configurations, one after the other, and measures
held-out images every few updates. Measuring and saving count neither as seconds nor as evaluations (rows
through the network, in rollouts, probes, references and learning). The matched model and the reward model of
`--output` are used, and made first where they are missing; `--seeds` are those of the methods. Prints, per
seed and overall, how many times sooner AWM (and TP-GRPO) reaches the reward that Flow-GRPO has in the end.
Times are of the wall: keep the machine quiet.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from examples.image_rl.demo import METHODS, VERSIONS, begin, prepare, quiet, version
from examples.video_grounding.demo import train
from mmrl.config.schema import Config, load

RESULTS = Path(__file__).parent / "results" / "flow_reward_per_second.json"
REWARD, HELD_OUT = "clip_score", "coloured_shape"
FIRST = METHODS[0]  # whose final reward the others are to reach


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write and print what it finds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/demo-image"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--every", type=int, default=10, help="measurements per run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to all methods")
    given = parser.parse_args(arguments)
    quiet()
    given.output.mkdir(parents=True, exist_ok=True)
    start = prepare(given.output, 0, {})
    begun = {name: start.measured.metrics[name] for name in (REWARD, HELD_OUT)}
    runs = {
        seed: {name: follow(name, given, seed, start.model, begun) for name in METHODS}
        for seed in given.seeds
    }
    found = {
        "device": device(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in VERSIONS},
        "start": begun,
        "runs": runs,
        "sooner": {by: sooner(runs, by) for by in ("seconds", "evaluations")},
    }
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    return 0


def follow(
    name: str, given: argparse.Namespace, seed: int, start: Path, begun: Mapping[str, float]
) -> list[dict[str, float]]:
    """Train by one method, and list what was spent and what was reached, the start first."""
    folder = given.output / f"benchmark-{seed}"
    steps = load(f"examples/image_rl/{name}.yaml", given.overrides, Config).max_steps
    changes = [*given.overrides, "overwrite_output_dir=true", f"eval_steps={max(1, steps // given.every)}"]
    run, spent = begin(name, folder, seed, start, changes, shared=given.output)
    records = train(run).records
    points = [{"updates": 0, "seconds": 0.0, "evaluations": 0, **begun}]
    for record, (seconds, evaluations) in zip(records, spent.log, strict=True):
        if f"eval_{REWARD}" in record:
            reached = {metric: record[f"eval_{metric}"] for metric in (REWARD, HELD_OUT)}
            cost = {"seconds": round(seconds, 2), "evaluations": evaluations}
            points.append({"updates": record["step"] + 1, **cost, **reached})
    return points


def reaches(points: Sequence[Mapping[str, float]], reward: float, by: str) -> float | None:
    """Find what was spent when a reward was first reached, on the straight line between measurements."""
    for before, here in zip(points[:-1], points[1:], strict=True):
        if here[REWARD] >= reward:
            share = (reward - before[REWARD]) / (here[REWARD] - before[REWARD])
            return before[by] + max(share, 0.0) * (here[by] - before[by])
    return None


def sooner(runs: Mapping[int, Mapping[str, Any]], by: str) -> dict[str, Any]:
    """Tell how many times less each method spends to reach the final reward of the first, seed by seed.

    A method that does not reach it has None, and no mean.
    """
    ratios: dict[str, Any] = {}
    for name in METHODS[1:]:
        each = []
        for methods in runs.values():
            last = methods[FIRST][-1]
            spent = reaches(methods[name], last[REWARD], by)
            each.append(round(last[by] / spent, 2) if spent else None)
        ratios[name] = {"each": each, "mean": round(mean(each), 2) if all(each) else None}
    return ratios


def device() -> str:
    """Name the processor, and the accelerator if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def show(found: Mapping[str, Any]) -> None:
    """Print the last measurement of every run, and the ratios."""
    print(f"{found['device']}, {found['threads']} threads; start {found['start']}")
    for seed, methods in found["runs"].items():
        for name, points in methods.items():
            last = points[-1]
            reached = f"{REWARD} {last[REWARD]:.3f}  {HELD_OUT} {last[HELD_OUT]:.3f}"
            cost = f"{last['updates']} updates  {last['seconds']:.1f} s  {last['evaluations']:,} evaluations"
            print(f"seed {seed}  {name:9}  {cost}  {reached}")
    for by, ratios in found["sooner"].items():
        for name, ratio in ratios.items():
            each = ", ".join(f"{one} times" if one else "not at all" for one in ratio["each"])
            print(f"{name} reaches the final reward of {FIRST} with fewer {by}, seed by seed: {each}")


if __name__ == "__main__":
    sys.exit(main())
