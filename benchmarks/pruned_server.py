"""Rollouts of a pruned server: GRPO for grounding in videos, with tokens of videos dropped by vLLM or here.

    MMRL_VLLM=.venv-vllm python -m benchmarks.pruned_server --videos FOLDER [--steps 40] [--rates 0 0.25 0.5]

The model of `make demo` after its cold start (`--videos`: the sample videos of `make demo`) is trained by
GRPO from there, once for each way of rollouts: a vLLM server with `--video-pruning-rate` (Efficient Video
Sampling), and `vision.generate` with the transform `div_prune`, which keeps the same share of the 8 tokens of
a video. The policy that learns sees all of them; `truncated_importance` corrects. "reward" and "ess" are
means over all steps, the effective sample size as a share of the answers (rows) or of their tokens. "gap" is
the mean difference of log-probabilities in the first step, "mIoU" that of greedy answers of the whole policy
to held-out videos at the end. One seed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.machine import processor
from benchmarks.vllm_servers import serving
from examples.video_grounding import demo
from mmrl.build import build
from mmrl.config.schema import Config, Piece, load
from mmrl.reporting.metrics import Journal
from mmrl.training.loop import train

RESULTS = Path(__file__).parent / "results" / "pruned_server.json"
MEANS = {
    "reward": "rewards/temporal_iou/mean",
    "ess_rows": "sampling/ess/rows",
    "ess_tokens": "sampling/ess/steps",
    "kl": "sampling/kl",
    "rollout_seconds": "time/rollout",
}


def cold_start(home: Path, videos: Path) -> tuple[Path, list[str]]:
    """Train the start of `make demo`, unless it is there; return it, and changes that name the data."""
    data = []
    for place, split in (("data", "train"), ("evaluation.data", "test")):
        data += [f"{place}.path={home / 'videos' / split}.jsonl", f"{place}.root={home / 'videos'}"]
    model = home / "cold_start" / "checkpoint-380" / "model"
    if not model.exists():
        demo.build("examples/video_grounding/videos.yaml", home / "videos", 0, [f"build.sources={videos}"])
        demo.build("examples/video_grounding/model.yaml", home / "model", 0)
        changes = [*data, f"policy.model={home / 'model'}"]
        demo.train(demo.make("examples/video_grounding/cold_start.yaml", home / "cold_start", 0, changes))
    return model, data


def run_of(
    engine: Mapping[str, Any], model: Path, data: list[str], folder: Path, steps: int
) -> dict[str, float]:
    """Train by GRPO with rollouts of an engine; return its figures."""
    changes = [
        *data,
        f"policy.model={model}",
        f"output_dir={folder}",
        f"max_steps={steps}",
        f"learn.learning_rate.steps={steps}",
        "overwrite_output_dir=true",
        "report.visualizations=[]",
        "objective.step_weight=[truncated_importance]",
        f"rollout.engine={json.dumps([engine])}",
    ]
    train(build(load("examples/video_grounding/grpo.yaml", changes, Config), quiet=True))
    rows = Journal(folder).read()
    found = {name: round(mean(row[key] for row in rows if key in row), 4) for name, key in MEANS.items()}
    gap = rows[0].get("sampling/sampling_logp_difference/mean", 0.0)
    measured = json.loads((folder / "evaluation.json").read_text())["metrics"]
    return {**found, "gap": round(gap, 4), "mIoU": round(measured["mIoU"], 4)}


def main() -> None:
    """Train every way, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--videos", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("runs/pruned_server"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.25, 0.5])
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    home = given.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    model, data = cold_start(home, given.videos.resolve())
    runs = []
    for rate in given.rates:
        for name in ("vision.vllm", "vision.generate"):
            engine: dict[str, Any] = {"name": name, "max_completion_length": 24}
            with ExitStack() as stack:
                if name == "vision.vllm":
                    engine |= {"weights_folder": str(home / "weights"), "video_pruning_rate": rate}
                    policy = Piece("vision.tokens", {"model": str(model), "dtype": "float32"})
                    servers = serving(os.environ["MMRL_VLLM"], policy, 1, home, options=engine)
                    urls, _ = stack.enter_context(servers)
                    engine["servers"] = urls
                elif rate:
                    engine["transform"] = [{"name": "compression.div_prune", "keep": 1 - rate}]
                folder = home / f"{name}-{rate:g}"
                runs.append(
                    {"engine": name, "rate": rate, **run_of(engine, model, data, folder, given.steps)}
                )
            print(json.dumps(runs[-1]), flush=True)
    report = {"processor": processor(), "steps": given.steps, "runs": runs}
    given.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
