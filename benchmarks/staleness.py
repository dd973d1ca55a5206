"""Rollouts made while the policy learns: seconds of a step and reward of `max_staleness` 0 and 1.

    python -m benchmarks.staleness [--seeds 3] [--home runs/staleness] [--quick]

GRPO on easy-VQA, from the model and with the rate of the league table (benchmarks/league.py): 20 steps of 16
prompts, 8 answers to each. Rollouts are made by one Ray worker of one thread, the policy learns in a process
of one thread; with 0 each waits for the other. Both objectives have `truncated_importance`. Runs of a seed
follow each other, lag 0 before lag 1, so that a machine with other work is about as busy for both. Seconds
are those of the wall, medians over all steps but the first two, in which the workers start. The reward is the
mean of four sampled answers to 200 held-out questions after the last step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from benchmarks.league_tasks import configuration, easy_vqa
from benchmarks.machine import processor
from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, load
from mmrl.reporting.metrics import Journal
from mmrl.training.loop import train

RESULTS = Path(__file__).parent / "results" / "staleness.json"
STEPS, PROMPTS, HELD_OUT = 20, 16, 200
STARTING = 2  # steps that are not counted


def run_of(shared: Mapping[str, Any], folder: Path, lag: int, seed: int) -> dict[str, float]:
    """Train one run and return its seconds a step, its parts and its reward."""
    raw = configuration("grpo", shared, folder, seed)
    raw = merge(raw, {"objective": {"step_weight": ["truncated_importance"]}})
    raw["rollout"]["engine"] = [*raw["rollout"]["engine"], {"name": "ray_workers", "num_workers": 1}]
    raw["rollout"]["max_staleness"] = lag
    began = time.perf_counter()
    train(build(load({**raw, "overwrite_output_dir": True}, kind=Config), quiet=True))
    seconds = time.perf_counter() - began
    steps = Journal(folder).read()
    counted = steps[STARTING:] or steps

    def middle(name: str, less: str = "") -> float:
        return round(median(step[name] - step.get(less, 0.0) for step in counted), 4)

    return {
        "lag": lag,
        "seed": seed,
        "step_seconds": middle("step_time", less="time/evaluate"),
        "waited_for_rollouts": middle("time/rollout"),
        "learned": middle("time/learn"),
        "run_seconds": round(seconds, 1),
        "reward": round(json.loads((folder / "evaluation.json").read_text())["metrics"]["exact_match"], 4),
        "ess": round(mean(step["sampling/ess/rows"] for step in counted), 4),
    }


def summary(runs: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Give a line for each lag, and the ratio of seconds within seeds."""
    lines: list[dict[str, Any]] = []
    for lag in (0, 1):
        of = [run for run in runs if run["lag"] == lag]
        rewards = [run["reward"] for run in of]
        line = {
            name: round(median(run[name] for run in of), 4)
            for name in of[0]
            if name not in ("seed", "reward")
        }
        spread = round(stdev(rewards), 4) if len(rewards) > 1 else None
        lines.append({**line, "seeds": len(of), "reward": round(mean(rewards), 4), "reward_std": spread})
    pairs = zip(*([run["step_seconds"] for run in runs if run["lag"] == lag] for lag in (0, 1)), strict=True)
    return [*lines, {"times_faster": [round(slow / fast, 2) for slow, fast in pairs]}]


def main() -> None:
    """Measure and write lines of JSON."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--home", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--source", default="", help="where the package easy-vqa is, if it is not installed")
    parser.add_argument("--quick", action="store_true", help="two steps of one seed; writes no results here")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if given.quick:
        given.seeds, given.output = 1, given.home / "staleness.json"
    given.home.mkdir(parents=True, exist_ok=True)
    shared = easy_vqa(given.home.resolve(), given.source, given.quick)
    shared["rollout"]["num_prompts"], shared["evaluation"]["num_prompts"] = PROMPTS, HELD_OUT
    shared["max_steps"] = shared["save_steps"] = 2 if given.quick else STEPS
    runs = []
    for seed in range(given.seeds):
        for lag in (0, 1):
            runs.append(run_of(shared, given.home / f"lag-{lag}-seed-{seed}", lag, seed))
            print(json.dumps(runs[-1]), flush=True)
    lines = [{"processor": processor()}, *runs, *summary(runs)]
    given.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
