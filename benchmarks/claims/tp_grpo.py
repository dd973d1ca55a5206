"""TP-GRPO against Flow-GRPO where a few of many denoising steps decide the reward.

    python -m benchmarks.claims.tp_grpo [--seeds 0 1 2] [--quick]

docs/claims.md says what is claimed and compared. The rate was chosen with Flow-GRPO at seed 100 (`RATE`).
Writes results/claims_tp_grpo.json.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims.common import Claim, leave, once, options, outcome, row, value
from benchmarks.claims.corners import SIDE, write
from examples.image_rl.demo import Spent, quiet
from mmrl.build import build, check, load_evaluator
from mmrl.cli import main as mmrl
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, EvaluateConfig, parse
from mmrl.core.reward_table import RewardTable
from mmrl.training.loop import train

STEPS, STOCHASTIC = 16, [0, 15]  # of denoising; all but the last
PROMPTS, GROUP, UPDATES = 8, 8, 40
RATE = 1e-3
HERE = "benchmarks.claims.corners"
MEASURE = "right_corner"
REPORT = {"trackers": [], "log_completions": False, "startup_checks": [], "checks": []}
FLOW, TURNING = "methods/flow/flow_grpo.yaml", "methods/flow/tp_grpo.yaml"
BASE = "Flow-GRPO"
MORE = "Flow-GRPO, as many network evaluations"
RUNS = {BASE: FLOW, "TP-GRPO": TURNING, MORE: FLOW}  # file of the method

CLAIM = Claim(
    method="TP-GRPO",
    baseline=BASE,
    claim="A step's own change of the reward, and at turning points all that follows, teaches more in as "
    "many updates than the reward of the image at every step (arXiv 2602.06422).",
    situation=f"{STEPS} denoising steps that choose one of four corners; the reward is likeness to one.",
    measure=MEASURE,
)


def shared(folder: Path, model: Path, quick: bool) -> dict[str, Any]:
    """Say what all runs share: policy, captions, reward and evaluation."""
    sizes = {"num_inference_steps": STEPS, "guidance_scale": 1.0, "height": SIDE, "width": SIDE}
    data = {"name": "diffusion.prompts", "path": str(folder / "images" / "prompts.jsonl")}
    rewards = [f"{HERE}:right_corner", {"name": f"{HERE}:likeness"}]
    return {
        "policy": {"name": "diffusion.flow", "model": str(model), "dtype": "float32",
                   "max_sequence_length": 1},
        "data": data,
        "rewards": [f"{HERE}:likeness"],
        "rollout": {"engine": [{"name": "diffusion.denoise", **sizes}]},
        "report": REPORT,
        "save_steps": 1_000_000,
        "evaluation": {
            "data": data,
            "engine": [{"name": "diffusion.denoise", **sizes}],
            "rewards": rewards,
            "num_generations": 1 if quick else 16,
        },
    }  # fmt: skip


def start(folder: Path, seed: int, quick: bool) -> Path:
    """Match a small network to drawings of every corner; return its folder."""
    model = folder / "matching" / f"checkpoint-{(steps := 3 if quick else 300)}" / "model"
    if model.exists():
        return model
    write(folder / "images", 2 if quick else 24)
    built = {
        "build": {"name": "diffusion.tiny_flow_model", "texts": str(folder / "images" / "prompts.jsonl"),
                  "side": SIDE, "patch": 2, "width": 32, "layers": 2, "text_width": 32, "text_length": 4},
        "output": str(folder / "model"), "seed": seed,
    }  # fmt: skip
    (folder / "model.yaml").write_text(str(built))
    if mmrl(["build", str(folder / "model.yaml")]):
        raise SystemExit(1)
    matched = {
        "policy": {"likelihood": {"name": "diffusion.matching", "weighting": "uniform", "draws": 1,
                                  "time_type": "uniform", "lowest": 0.0, "shift": 1.0}},
        "data": {"name": "diffusion.images", "path": str(folder / "images" / "train.jsonl"),
                 "root": str(folder / "images")},
        "rewards": [{"name": "precomputed", "key": "score"}],
        "advantage": [{"name": "pick", "of": "precomputed"}],
        "rollout": {"engine": ["offline"], "num_prompts": 96, "num_generations": 1},
        "learn": {"learning_rate": {"name": "linear", "start": 3e-3, "end": 1e-4, "steps": steps},
                  "optimizer": "muon", "micro_batch_steps": 512},
        "max_steps": steps, "save_steps": steps, "seed": seed, "output_dir": str(folder / "matching"),
    }  # fmt: skip
    raw = shared(folder, folder / "model", quick)
    raw = {key: raw[key] for key in ("policy", "report")}
    shutil.rmtree(folder / "matching", ignore_errors=True)
    raw = merge(read("methods/grpo/supervised.yaml"), raw)
    train(build(parse(merge(raw, matched), Config), quiet=True))
    return model


def answers(table: RewardTable) -> dict[str, dict[str, float]]:
    """Return every image's scores, by caption and number."""
    names = [f"{uid}#{at}" for at, uid in enumerate(table.uids)]
    return {
        name: dict(zip(names, table.at_end(name).tolist(), strict=True))
        for name in ("right_corner", "likeness")
    }


def train_one(name: str, given: argparse.Namespace, seed: int, updates: int, rate: float) -> dict[str, Any]:
    """Train a row of the table from the start of its seed, and measure it."""
    folder = given.runs / f"seed-{seed}"
    method = RUNS[name]
    raw = shared(folder, start(folder, seed, given.quick), given.quick)
    engine = {**raw["rollout"]["engine"][0], "stochastic": STOCHASTIC,
              "solver": {"name": "diffusion.flow_sde", "noise_level": 0.7}}  # fmt: skip
    ahead = [engine, "diffusion.with_prefix_rollouts"] if method == TURNING else [engine]
    output = folder / name.replace(" ", "_").replace(",", "")
    shutil.rmtree(output, ignore_errors=True)
    same = {
        "objective": {"surrogate": {"name": "clip", "epsilon": 1e-4},
                      "penalty": [{"name": "gaussian_kl", "coef": 0.04}]},
        "rollout": {"engine": ahead, "num_prompts": 1 if given.quick else PROMPTS,
                    "num_generations": GROUP},
        "learn": {"learning_rate": rate, "micro_batch_steps": 4096, "minibatches": 1},
        "max_steps": updates, "seed": seed, "output_dir": str(output),
    }  # fmt: skip
    config = parse(merge(merge(read(method), raw), same), Config)
    check(config)
    spent = Spent()
    run = spent.watch(build(config, quiet=True))
    train(run)
    scores = answers(run.final.table)
    shutil.rmtree(output)
    return {"seed": seed, "answers": scores, "evaluations": spent.evaluations, "updates": updates}


def before(folder: Path, model: Path, seed: int, quick: bool) -> dict[str, Any]:
    """Measure the start."""
    raw = shared(folder, model, quick)
    wanted = parse({key: raw[key] for key in ("policy", "evaluation")} | {"seed": seed}, EvaluateConfig)
    return {"answers": answers(load_evaluator(wanted).measure(intervals=False).table)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the table."""
    given = options("tp_grpo", __doc__, arguments)
    quiet()
    begun: list[float] = []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    for seed in given.seeds:
        folder = given.runs / f"seed-{seed}"
        model = start(folder, seed, given.quick)
        first = once(folder / "start.json", lambda f=folder, m=model, s=seed: before(f, m, s, given.quick))
        begun.append(value(first, MEASURE))
        for name, done in runs.items():
            updates = 1 if given.quick else UPDATES
            if name == MORE:  # equal cost: more updates of the cheaper method
                dear, cheap = (runs[of][-1]["evaluations"] for of in ("TP-GRPO", BASE))
                updates = round(updates * dear / cheap)
            call = lambda n=name, s=seed, u=updates: train_one(n, given, s, u, RATE)
            done.append(once(folder / f"{name}.json", call))
            print(name, seed, value(done[-1], MEASURE), done[-1]["seconds"], flush=True)
    rows = [row(name, done, runs[BASE], MEASURE) for name, done in runs.items()]
    for one, done in zip(rows, runs.values(), strict=True):
        one["updates"], one["evaluations"] = done[0]["updates"], done[0]["evaluations"]
    mean, low, high = row("", runs["TP-GRPO"], runs[MORE], MEASURE)["gain"]
    verdict = f"{outcome(rows[1]['gain'])}: at equal updates; at equal network evaluations TP-GRPO less "
    verdict += f"Flow-GRPO is {mean:+.3f} ({low:+.3f} to {high:+.3f})"
    every = [run for done in runs.values() for run in done]
    leave(given, CLAIM, sum(begun) / len(begun), rows, verdict, every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
