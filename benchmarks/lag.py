"""Reward against time at several lags, with answers of a vLLM server: `rollout.max_staleness` 0, 1 and 4.

    MMRL_VLLM=.venv-vllm python -m benchmarks.lag [--seeds 1] [--steps 30] [--home runs/lag] [--quick]

GRPO on the model of `make demo` with its first weights: videos of plain shots, 8 prompts a step, 4 answers to
each of up to 24 tokens, and the number of letters as reward (`letters`). One server of one thread answers,
the policy learns in a process of one thread. At lag 4, answers come whole from weights that are four steps
older, or are continued by newer weights every 6 tokens (`partial_rollouts`). All lags above 0 have the
default correction, lag 0 has none. Seconds are those of the wall, without the first two steps.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.machine import processor
from benchmarks.vllm_servers import demo_files, serving
from mmrl.build import build
from mmrl.config.schema import Config, Piece, load
from mmrl.reporting.metrics import Journal
from mmrl.training.loop import train

RESULTS = Path(__file__).parent / "results" / "lag.json"
SETTINGS = ((0, False), (1, False), (4, False), (4, True))  # max_staleness, partial_rollouts
STARTING, LAST = 2, 10  # steps that are not counted; last steps over which the reward is averaged


def letters(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward the number of letters, in tens."""
    return [sum(map(str.isalpha, completion)) / 10 for completion in completions]


def run_of(files: Path, url: str, folder: Path, lag: int, partial: bool, seed: int, steps: int) -> list[dict]:
    """Train one run and return its journal."""
    engine = f"name: vision.vllm, servers: ['{url}'], max_completion_length: 24, partial_rollouts: {partial}"
    changes = (
        f"policy.model={files / 'model'}",
        *(f"{part}.root={files / 'videos'}" for part in ("data", "evaluation.data")),
        f"data.path={files / 'videos' / 'train.jsonl'}",
        f"evaluation.data.path={files / 'videos' / 'test.jsonl'}",
        f"rollout.engine=[{{{engine}, weights_folder: {folder / 'weights'}}}]",
        "rollout.num_prompts=8",
        "learn.learning_rate=4e-3",  # at 3e-4, thirty steps raise no reward
        f"rollout.max_staleness={lag}",
        "rewards=[benchmarks.lag:letters]",
        "evaluation.rewards=[benchmarks.lag:letters]",
        "evaluation.metrics=[{name: mean, of: letters}]",
        "evaluation.num_prompts=1",
        "report={visualizations: [], trackers: [], log_completions: false}",
        f"max_steps={steps}",
        f"save_steps={steps}",
        f"seed={seed}",
        f"output_dir={folder}",
        "overwrite_output_dir=true",
    )
    train(build(load("examples/video_grounding/grpo.yaml", changes, Config), quiet=True))
    return Journal(folder).read()


def described(journal: list[dict[str, Any]], lag: int, partial: bool, seed: int) -> dict[str, Any]:
    """Summarise a run: seconds of a step and of waiting, reward, age, and pairs of seconds and reward."""
    counted = journal[STARTING:]
    average = lambda name: round(mean(step.get(name, 0.0) for step in counted), 3)
    passed = [round(seconds, 2) for seconds in accumulate(step["step_time"] for step in journal)]
    return {
        "lag": lag,
        "partial_rollouts": partial,
        "seed": seed,
        "step_seconds": round(median(step["step_time"] for step in counted), 3),
        "waiting_seconds": round(median(step["time/rollout"] for step in counted), 3),
        "learning_seconds": round(median(step["time/learn"] for step in counted), 3),
        "run_seconds": passed[-1],
        "reward": round(mean(step["reward"] for step in journal[-LAST:]), 3),
        "age": average("sampling/age/mean"),
        "oldest": max(step.get("sampling/age/max", 0.0) for step in journal),
        "ess": average("sampling/ess/rows"),
        "curve": [[time, round(step["reward"], 3)] for time, step in zip(passed, journal, strict=True)],
    }


def with_seconds_to(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the seconds until the mean reward of 5 steps is as high as at the end of the run of lag 0."""
    for run in runs:
        goal = 0.9 * next(r["reward"] for r in runs if r["lag"] == 0 and r["seed"] == run["seed"])
        window = [
            (run["curve"][i][0], mean(reward for _, reward in run["curve"][i - 4 : i + 1]))
            for i in range(4, len(run["curve"]))
        ]
        run["seconds_to_goal"] = next((time for time, reward in window if reward >= goal), None)
        run["goal"] = round(goal, 3)
    return runs


def main() -> None:
    """Measure and write lines of JSON."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--home", type=Path, default=Path("runs/lag"))
    parser.add_argument("--quick", action="store_true", help="three steps; writes no results here")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick:
        given.steps, given.output = 3, given.home / "lag.json"
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    home = given.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    files = home if (home / "model").exists() else demo_files(home)
    policy = {"model": str(files / "model"), "dtype": "float32", "freeze_vision_tower": False}
    runs = []
    with serving(os.environ["MMRL_VLLM"], Piece("vision.tokens", policy), 1, home) as (urls, _):
        for seed in range(given.seeds):
            for lag, partial in SETTINGS:
                folder = home / f"lag-{lag}{'-partial' * partial}-seed-{seed}"
                journal = run_of(files, urls[0], folder, lag, partial, seed, given.steps)
                runs.append(described(journal, lag, partial, seed))
                shown = {name: value for name, value in runs[-1].items() if name != "curve"}
                print(json.dumps(shown), flush=True)
    lines = [{"processor": processor(), "steps": given.steps}, *with_seconds_to(runs)]
    given.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
