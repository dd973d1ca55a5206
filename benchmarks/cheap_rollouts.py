"""Rollouts on a cheaper model than the one that learns: what is learned, and what is saved.

    python -m benchmarks.cheap_rollouts --demo runs/demo [--seeds 0 1 2] [--steps 100]
    python -m benchmarks.cheap_rollouts --large [--repeats 5]

`--demo` is a folder that `make demo` left: its videos and its start are used. The run of
examples/video_grounding/cheap_rollouts.yaml and its exact twin, examples/video_grounding/grpo.yaml, are
trained from every seed. `--large` times rollouts alone, of a model as that of grpo_step.py over one large
image, on every engine in turn; seconds are processor time of the process, one thread. Both write their part
of results/cheap_rollouts.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.grpo_step import (
    GROUP,
    HEADS,
    LAYERS,
    TOWER,
    VOCABULARY,
    WIDTH,
    make_data,
    make_run,
    seconds_of,
)

RESULTS = Path(__file__).parent / "results" / "cheap_rollouts.json"
RUNS = {
    "exact": "examples/video_grounding/grpo.yaml",
    "cheap": "examples/video_grounding/cheap_rollouts.yaml",
}
LAST = 20  # steps whose mean is the last training reward, as the engine of the run earns it
ASKED = 256  # prompts that the final policy answers exactly, four times each
SETTINGS = ((1024, 32), (2304, 32), (2304, 128))  # visual tokens, tokens of an answer


# ---- the demo


def run_demo(folder: Path, output: Path, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train both runs from every seed; runs that are there already are read."""
    start = sorted((folder / "cold_start").glob("checkpoint-*/model"))[-1]
    found: dict[str, Any] = {"steps": steps, "runs": []}
    for seed in seeds:
        for name, config in RUNS.items():
            here = output / f"{name}-{seed}"
            if not (here / "report.html").exists():
                train_one(config, folder, start, here, seed, steps)
            exactly = reward_of(folder, here / f"checkpoint-{steps}" / "model", seed)
            found["runs"].append({"engine": name, "seed": seed, "reward": exactly, **read_one(here)})
    return found | {"summary": summarise(found["runs"])}


def train_one(config: str, folder: Path, start: Path, output: Path, seed: int, steps: int) -> None:
    from mmrl.build import build
    from mmrl.config.schema import Config, load
    from mmrl.training.loop import train

    changes = [f"policy.model={start}", f"seed={seed}", f"max_steps={steps}", f"output_dir={output}"]
    for data, split in (("data", "train"), ("evaluation.data", "test")):
        changes += [f"{data}.path={folder / 'videos' / split}.jsonl", f"{data}.root={folder / 'videos'}"]
    train(build(load(config, [*changes, "report.log_completions=false"], Config)))


def reward_of(folder: Path, model: Path, seed: int) -> float:
    """Measure the reward of a trained policy on prompts of its training, sampled exactly."""
    from mmrl.build import load_evaluator
    from mmrl.config.loading import read
    from mmrl.config.schema import EvaluateConfig, parse

    raw = read("examples/video_grounding/cheap_rollouts.yaml")
    data = {**raw["data"], "path": str(folder / "videos" / "train.jsonl"), "root": str(folder / "videos")}
    asked = {
        "policy": {**raw["policy"], "model": str(model)},
        "evaluation": {
            "data": data,
            "engine": [{"name": "vision.generate", "max_completion_length": 24}],
            "rewards": raw["rewards"],
            "metrics": [{"name": "mean", "of": "temporal_iou"}, {"name": "mean", "of": "tag_format"}],
            "num_prompts": ASKED,
            "num_generations": 4,
        },
        "seed": seed,
    }
    found = load_evaluator(parse(asked, EvaluateConfig)).measure(intervals=False)
    weights = {"vision.temporal_iou": 1.0, "tag_format": 0.1}  # as in examples/video_grounding/common.yaml
    return round(sum(weight * found.metrics[name.rpartition(".")[2]] for name, weight in weights.items()), 4)


def read_one(folder: Path) -> dict[str, Any]:
    """Read a run's journal and its last evaluation."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = list({record["step"]: record for record in map(json.loads, lines)}.values())
    measured = json.loads((folder / "evaluation.json").read_text())

    def over(name: str, part: Sequence[Mapping[str, Any]] = records) -> float | None:
        known = [record[name] for record in part if record.get(name) is not None]
        return round(mean(known), 4) + 0.0 if known else None

    return {
        "training_reward": over("reward", records[-LAST:]),
        "mIoU": round(measured["metrics"]["mIoU"], 4),
        "mIoU_interval": [round(x, 4) for x in measured["intervals"]["mIoU"]],
        "kl": over("sampling/kl"),
        "effective_share_steps": over("sampling/ess/steps"),
        "effective_share_rows": over("sampling/ess/rows"),
        "agreement": over("rollout/agreement"),
        "rollout_times_faster": over("rollout/speedup"),
        "rollout_seconds": round(median(record["time/rollout"] for record in records), 3),
    }


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare means over seeds with the spread of the exact runs."""
    summary: dict[str, Any] = {}
    for name in ("reward", "training_reward", "mIoU"):
        by = {engine: [run[name] for run in runs if run["engine"] == engine] for engine in RUNS}
        summary[name] = {engine: round(mean(values), 4) for engine, values in by.items()}
        if len(by["exact"]) > 1:
            summary[name] |= {f"{engine}_sd": round(stdev(values), 4) for engine, values in by.items()}
        # The twins of a seed begin with the same prompts.
        summary[name]["gap_by_seed"] = [
            round(b - a, 4) for a, b in zip(by["exact"], by["cheap"], strict=True)
        ]
    return summary


# ---- one larger setting


def engines(layers: int) -> dict[str, dict[str, Any]]:
    from mmrl.compression.caches.visual_quant import visual_quant
    from mmrl.compression.transforms.visual_computation import drop_visual_layers, yopo25

    few, exact = ({"cache": partial(visual_quant, nbits=nbits)} for nbits in (1, 16))
    late, yopo = ({"transform": (one,)} for one in (partial(drop_visual_layers, after=layers // 2), yopo25))
    # At 16 bits a cache loses nothing; a pruned model needs one that lets rows share their prompt.
    return {
        "exact": {},
        "visual_quant 1": few,
        "drop_visual_layers": late,
        "drop_visual_layers, visual_quant 16": late | exact,
        "drop_visual_layers, visual_quant 1": late | few,
        "yopo25": yopo,
        "yopo25, visual_quant 16": yopo | exact,
        "yopo25, visual_quant 1": yopo | few,
    }


def make_model(folder: Path, visual: int) -> Path:
    """Build the model of grpo_step.py for images of so many visual tokens."""
    from mmrl.core.rng import Stream
    from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl

    TinyQwen2_5Vl(
        stream=Stream(0), vocab_size=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS,
        vision_width=TOWER, max_pixels=visual * 28 * 28,
    ).build(folder / "model")  # fmt: skip
    return folder / "model"


def run_large(visual: int, length: int, repeats: int) -> dict[str, Any]:
    """Time rollouts of one group, and compare what was sampled with the exact model."""
    from mmrl.vision.engines.generate import Generate

    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        folder = Path(place)
        run = make_run(folder, make_model(folder, visual), make_data(folder, visual, 2), length)
        prompts = run.method.sampler.draw(1, GROUP)
        policy = run.policy
        layers = policy.model.config.get_text_config().num_hidden_layers
        made = {
            name: Generate(policy, stream=run.stream, max_completion_length=length, **options)
            for name, options in engines(layers).items()
        }
        gaps = {name: gap_of(policy, one.rollout(prompts)) for name, one in made.items()}
        calls: dict[str, Callable[[], object]] = {
            name: partial(one.rollout, prompts) for name, one in made.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                taken[name].append(seconds_of(call))
    seconds = {name: median(times) for name, times in taken.items()}
    return {
        name: {
            "seconds": round(seconds[name], 3),
            "spread": [round(min(taken[name]), 3), round(max(taken[name]), 3)],
            "speedup": round(seconds["exact"] / seconds[name], 2),
            **gaps[name],
        }
        for name in made
    }


@torch.no_grad()
def gap_of(policy: Any, rows: Any) -> dict[str, float]:
    """Measure KL of engine to policy (k3, nats a step) and effective shares on rollouts."""
    batch = policy.collate(rows)
    gap = ((policy(batch).logp - batch.notes["logp"]) * batch.mask).double()
    steps, answers = gap[batch.mask > 0].exp(), gap.sum(1).exp()
    return {
        "kl": float(f"{float((steps - steps.log() - 1).mean()):.3g}"),
        "effective_share_steps": round(float(steps.mean() ** 2 / steps.square().mean()), 4),
        "effective_share_rows": round(float(answers.mean() ** 2 / answers.square().mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/cheap_rollouts"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.demo:
        found["demo"] = run_demo(options.demo, options.runs, options.seeds, options.steps)
    options.output.parent.mkdir(exist_ok=True)
    for visual, length in SETTINGS if options.large else ():
        name = f"{visual} visual tokens, {GROUP} answers of {length}"
        found.setdefault("large", {})[name] = run_large(visual, length, options.repeats)
        print(json.dumps({name: found["large"][name]}), flush=True)
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
