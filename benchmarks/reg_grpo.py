"""Reg-GRPO with and without difficulty augmentation against GRPO, on the videos of `make demo`.

    python -m benchmarks.reg_grpo --demo runs/demo [--seeds 0 1 2] [--steps 30]

`--demo` is a folder that `make demo` left; its videos and its start are used. Every method is trained from
every seed with as many rollouts and updates; the same command goes on where it was killed, and skips what is
done. Differences are paired by seed and held-out query, with a 95 % bootstrap interval over seeds and
videos. Seconds are processor time of the process, one thread. Writes results/reg_grpo.json and .png.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
RESAMPLES = 2000
SECONDS = "process_seconds.json"  # in the folder of a run
ANSWERS = "held_out.json"
SHARED = {
    "rollout": {"num_prompts": 8, "num_generations": 8},
    "learn": {
        "num_iterations": 2,  # with one, Reg-GRPO is GRPO without a clip
        "optimizer": "adamw",  # the demo's, Muon, takes more seconds than everything else
    },
    "evaluation": {"metrics": [{"name": "mean", "of": "temporal_iou", "label": "mIoU"}]},
    "report": {"log_completions": False, "visualizations": [], "checks": [], "startup_checks": []},
    "save_total_limit": 1,
}
RATE = 2e-4  # of the learning rate, at the first step; GRPO fell back at 1e-3
Change = Callable[[dict[str, Any]], None]


def regression(raw: dict[str, Any]) -> None:
    """Take the objective of configs/methods/grpo/reg_grpo.yaml, with the KL coefficient of the demo."""
    from mmrl.config.loading import read

    variant, penalty = read("configs/methods/grpo/reg_grpo.yaml"), raw["objective"]["penalty"]
    raw["objective"] = {**variant["objective"], "penalty": penalty}
    raw["advantage"] = variant["advantage"]


def augmentation(raw: dict[str, Any]) -> None:
    """Take the sampler of configs/methods/grounding/deepvideo_r1.yaml; the videos have no solutions."""
    from mmrl.config.loading import read

    first, augmented = read("configs/methods/grounding/deepvideo_r1.yaml")["sampler"]
    raw["sampler"] = [first, {**augmented, "max_reward": 1.1}]  # IoU, and a tenth for the format
    raw["rollout"]["max_rounds"] = 2


METHODS: dict[str, tuple[Change, ...]] = {  # name to changes of examples/video_grounding/grpo.yaml
    "GRPO": (),
    "GRPO, augmented": (augmentation,),
    "Reg-GRPO": (regression,),
    "Reg-GRPO, augmented": (regression, augmentation),
}


# ---- one run


class ProcessClock:
    """Counts the processor time of a run's steps, across restarts from checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.path, self.ended, self.last = folder / SECONDS, False, 0.0
        self.seconds = json.loads(self.path.read_text()) if self.path.exists() else 0.0

    def on_event(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add up the time since the last event, and write it down with a checkpoint."""
        now = time.process_time()
        self.seconds += now - self.last if event != "train_begin" else 0.0
        self.last = now
        if event == "save":
            self.path.write_text(json.dumps(self.seconds))


def configuration(demo: Path, output: Path, name: str, seed: int, steps: int) -> Any:
    """Make the configuration of a run."""
    from mmrl.config.loading import merge, read
    from mmrl.config.schema import Config, parse

    start = sorted((demo / "cold_start").glob("checkpoint-*/model"))[-1]
    raw = merge(read("examples/video_grounding/grpo.yaml"), SHARED)
    rate = {"name": "linear", "start": RATE, "end": RATE / 10, "steps": steps}
    place = {"data": {"path": str(demo / "videos/train.jsonl"), "root": str(demo / "videos")}}
    place["evaluation"] = {"data": {"path": str(demo / "videos/test.jsonl"), "root": str(demo / "videos")}}
    every = {"eval_steps": steps // 3, "eval_on_start": True, "save_steps": steps // 3}
    raw = merge(raw, {**place, **every, "policy": {"model": str(start)}, "learn": {"learning_rate": rate}})
    for change in METHODS[name]:
        change(raw)
    return parse({**raw, "seed": seed, "max_steps": steps, "output_dir": str(output)}, Config)


def train_one(demo: Path, output: Path, name: str, seed: int, steps: int) -> None:
    """Train a run, from its last checkpoint if there is one, and write what it answers held-out queries."""
    from mmrl.build import build
    from mmrl.training.loop import train

    run = build(configuration(demo, output, name, seed, steps))
    run.pieces.made["clock"] = ProcessClock(output)
    train(run)
    if run.final is None:  # it was told to stop, saved its step, and goes on when it is started again
        raise SystemExit(130)
    table = run.final.table
    scores = dict(zip(table.uids, table.at_end("temporal_iou").tolist(), strict=True))
    (output / ANSWERS).write_text(json.dumps(scores))


def read_one(folder: Path) -> dict[str, Any]:
    """Read the journal, the clock and the held-out answers of a finished run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    records = list({record["step"]: record for record in lines if "reward" in record}.values())
    start = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    curve = [[0, start["eval_mIoU"]]]
    curve += [[record["step"] + 1, record["eval_mIoU"]] for record in records if "eval_mIoU" in record]
    return {
        "iou": json.loads((folder / ANSWERS).read_text()),
        "curve": curve,
        "process_seconds": json.loads((folder / SECONDS).read_text()),
        "groups_with_gradient": mean(1 - record["frac_reward_zero_std"] for record in records),
        "noisy_prompts": mean(record.get("augmentation/noise_prompts", 0.0) for record in records),
    }


# ---- together


def paired(differences: Tensor, videos: Sequence[str]) -> dict[str, Any]:
    """Average (S, Q) differences of S seeds on Q queries, with an interval.

    Seeds and videos are both drawn with replacement; the queries of a video, or of a seed, go together.
    """
    generator = torch.Generator().manual_seed(0)
    names = sorted(set(videos))
    member = torch.tensor([names.index(video) for video in videos])
    sums = torch.zeros(len(differences), len(names), dtype=torch.float64).index_add(1, member, differences)
    counts = torch.bincount(member, minlength=len(names)).double()
    seeds = torch.randint(len(differences), (RESAMPLES, len(differences)), generator=generator)
    drawn = torch.randint(len(names), (RESAMPLES, len(names)), generator=generator)
    means = sums[seeds].mean(1).gather(1, drawn).sum(1) / counts[drawn].sum(1)  # (RESAMPLES,)
    interval = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {
        "mean": round(float(differences.mean()), 4),
        "interval": [round(end, 4) for end in interval],
        "by_seed": [round(value, 4) for value in differences.mean(1).tolist()],
    }


def summarise(runs: Mapping[str, Sequence[Mapping[str, Any]]], steps: int) -> dict[str, Any]:
    """Make one row per method: means over seeds, and differences to the first method."""
    first = next(iter(runs))
    queries = list(runs[first][0]["iou"])
    videos = [query.partition("#")[0] for query in queries]
    scores = {
        name: torch.tensor([[run["iou"][query] for query in queries] for run in of], dtype=torch.float64)
        for name, of in runs.items()
    }
    size = SHARED["rollout"]
    rows = {}
    for name, of in runs.items():
        rows[name] = {
            "rollouts": steps * size["num_prompts"] * size["num_generations"],
            "updates": steps * SHARED["learn"]["num_iterations"],
            "mIoU": round(float(scores[name].mean()), 4),
            "R1@0.5": round(float((scores[name] >= 0.5).double().mean()), 4),
            "process_seconds": round(mean(run["process_seconds"] for run in of), 1),
            "groups_with_gradient": round(mean(run["groups_with_gradient"] for run in of), 3),
            "noisy_prompts": round(mean(run["noisy_prompts"] for run in of), 2),
            "curves": [[[at, round(value, 4)] for at, value in run["curve"]] for run in of],
        }
        if name != first:
            rows[name][f"mIoU less {first}"] = paired(scores[name] - scores[first], videos)
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the rows as a Markdown table."""
    first = next(iter(rows))
    start = mean(curve[0][1] for curve in rows[first]["curves"])
    lines = [
        f"| method | mIoU (start {start:.3f}) | R1@0.5 | mIoU less {first} | by seed | groups with gradient "
        "| seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        gap = row.get(f"mIoU less {first}")
        cells = ["", ""]
        if gap:
            low, high = gap["interval"]
            seeds = ", ".join(f"{value:+.3f}" for value in gap["by_seed"])
            cells = [f"{gap['mean']:+.3f} ({low:+.3f} to {high:+.3f})", seeds]
        share = f"{row['groups_with_gradient']:.0%}"
        numbers = [f"{row['mIoU']:.3f}", f"{row['R1@0.5']:.3f}", *cells, share]
        lines.append(f"| {name} | {' | '.join(numbers)} | {row['process_seconds']:.0f} |")
    return "\n".join(lines)


def draw(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw held-out mIoU over rollouts: the mean over seeds, and single seeds as thin lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    size = SHARED["rollout"]["num_prompts"] * SHARED["rollout"]["num_generations"]
    for i, (name, row) in enumerate(rows.items()):
        curves = torch.tensor(row["curves"], dtype=torch.float64)  # (S, points, 2)
        at = (curves[0, :, 0] * size).tolist()
        axes.plot(at, curves[..., 1].mean(0).tolist(), color=f"C{i}", label=name)
        for curve in curves[..., 1].tolist():
            axes.plot(at, curve, color=f"C{i}", lw=0.5, alpha=0.5)
    axes.set_xlabel("rollouts")
    axes.set_ylabel("held-out mIoU")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--runs", type=Path, default=Path("runs/reg_grpo"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30, help="a multiple of 3")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.methods}
    for seed in options.seeds:
        for name in options.methods:
            folder = options.runs / f"{name.lower().replace(', ', '_').replace('-', '_')}-{seed}"
            if not (folder / ANSWERS).exists():
                train_one(options.demo, folder, name, seed, options.steps)
            runs[name].append(read_one(folder))
    rows = summarise(runs, options.steps)
    found = {"steps": options.steps, "seeds": options.seeds, "methods": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "reg_grpo.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(rows, options.output / "reg_grpo.png")
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
