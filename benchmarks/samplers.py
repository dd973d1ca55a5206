"""Which prompts are asked: samplers against each other at equal rollouts and at equal seconds.

    python -m benchmarks.samplers --demo runs/demo [--seeds 0 1 2] [--rollouts 3840] [--only uniform vade]

`--demo` is a folder that `make demo` left: its videos and its start are used. Every method trains GRPO from
the same start on the same `--prompts` questions until it has used its rollouts, and is evaluated on the
held-out videos on the way. Seconds are processor time of training, without evaluation. Runs that are finished
are read, one that was cut short goes on. Writes results/samplers.json and results/samplers.svg.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from mmrl.core.reward_table import RewardTable

RESULTS = Path(__file__).parent / "results"
PROMPTS, GROUPS, GENERATIONS = 320, 16, 4  # questions to train on; groups of a step; answers to each
FILTERED = {"group_filter": "varied"}
GENERATE = {"name": "vision.generate", "max_completion_length": 24}
METHODS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "dapo_rounds": {**FILTERED, "rollout": {"max_rounds": 3}},
    "vade": {"sampler": ["vade"]},
    "variance_aware": {"sampler": ["variance_aware"]},
    "source_bandit": {"sampler": [{"name": "source_bandit", "by": "query"}]},
    "with_replay": {
        "rollout": {"engine": [GENERATE, "with_replay"]},
        "objective": {"ratio": {"name": "step_ratio", "against": "engine"}},
    },
}
RESAMPLES = 2000


class Meter:
    """Counts rollouts and processor seconds of a run, and ends it when its rollouts are used up."""

    def __init__(self, budget: int) -> None:
        self.budget, self.used, self.seconds = budget, 0, 0.0
        self.groups = self.live = 0
        self._since = time.process_time()

    @property
    def ended(self) -> bool:
        """Whether the rollouts are used up."""
        return self.used >= self.budget

    def pause(self) -> None:
        """Add the time since the last call."""
        now = time.process_time()
        self.seconds, self._since = self.seconds + now - self._since, now

    def resume(self) -> None:
        """Leave the time since the last call out."""
        self._since = time.process_time()

    def on_event(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing: the budget is counted by `observe`."""

    def observe(self, rollouts: Any, table: RewardTable) -> None:
        """Count the rollouts of a round, and the groups whose rewards differ."""
        self.used += len(table)
        reward, group = table.reward(), table.group
        names = group.unique()
        self.groups += len(names)
        self.live += sum(float(reward[group == name].std()) > 1e-6 for name in names)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"used": self.used, "seconds": self.seconds, "groups": self.groups, "live": self.live}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.used, self.seconds = state["used"], state["seconds"]
        self.groups, self.live = state["groups"], state["live"]
        self.resume()


def train_one(name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train a method from a seed; return its evaluations by rollouts and seconds, and its last answers."""
    from mmrl.build import build
    from mmrl.config.loading import merge, read
    from mmrl.config.schema import Config, parse
    from mmrl.training.loop import train

    folder = options.runs / f"{name}-{seed}"
    steps = options.rollouts // (GROUPS * GENERATIONS)
    videos = options.demo / "videos"
    raw = merge(read("examples/video_grounding/grpo.yaml"), METHODS[name])
    start = sorted((options.demo / "cold_start").glob("checkpoint-*/model"))[-1]
    changes = {
        "policy": {"model": str(start)},
        "data": {"path": str(train_file(options)), "root": str(videos)},
        "evaluation": {"data": {"path": str(videos / "test.jsonl"), "root": str(videos)}},
        "rollout": {"num_prompts": GROUPS, "num_generations": GENERATIONS},
        "learn": {"learning_rate": {"steps": steps}},
        "report": {"log_completions": False},
        "eval_steps": max(1, steps // 4), "eval_on_start": True, "save_steps": max(1, steps // 4),
        "max_steps": steps, "seed": seed, "output_dir": str(folder),
    }  # fmt: skip
    run = build(parse(merge(raw, changes), Config), quiet=True)
    meter = run.pieces.made["meter"] = Meter(options.rollouts)
    curve: list[list[float]] = []
    evaluate = run.evaluator.measure

    def measured(**given: Any) -> Any:
        meter.pause()
        found = evaluate(**given)
        curve.append([meter.used, round(meter.seconds, 2), found.metrics["mIoU"]])
        meter.resume()
        return found

    run.evaluator.measure = measured
    train(run)
    table = run.final.table
    journal = [record for record in run.journal.read() if "reward" in record]
    return {
        "method": name, "seed": seed, "curve": known(folder, curve),
        "reward": round(mean(record["reward"] for record in journal[-len(journal) // 4 :]), 4),
        "live_groups": round(meter.live / meter.groups, 4), "steps": len(journal),
        "answers": dict(zip(table.uids, table.at_end("temporal_iou").tolist(), strict=True)),
    }  # fmt: skip


def known(folder: Path, curve: Sequence[Sequence[float]]) -> list[list[float]]:
    """Join the evaluations of a run with those of before it was cut short, which stand beside it."""
    path = folder / "curve.json"
    before = json.loads(path.read_text()) if path.exists() else []
    points = {point[0]: list(point) for point in [*before, *curve]}
    path.write_text(json.dumps(joined := [points[key] for key in sorted(points)]))
    return joined


def train_file(options: argparse.Namespace) -> Path:
    """Write the first questions of the demo as a data set of their own."""
    lines = (options.demo / "videos" / "train.jsonl").read_text().splitlines()[: options.prompts]
    path = options.runs / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


# ---- the table


def at_seconds(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """Interpolate the metric of a curve at a time."""
    for (_, begin, low), (_, end, high) in pairwise(curve):
        if begin <= seconds <= end:
            return low + (high - low) * (seconds - begin) / max(end - begin, 1e-9)
    return curve[-1][2]


def gap(found: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Compare held-out answers with those of another method: mean difference, and its 95 % interval.

    Both the seeds and the questions are drawn again, each pair together.
    """
    pairs = torch.tensor(
        [
            [one["answers"][uid] - other["answers"][uid] for uid in one["answers"]]
            for one, other in zip(found, base, strict=True)
        ],
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(0)
    seeds, questions = pairs.shape
    means = []
    for _ in range(RESAMPLES):
        rows = torch.randint(seeds, (seeds,), generator=generator)
        columns = torch.randint(questions, (questions,), generator=generator)
        means.append(pairs[rows][:, columns].mean())
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return round(float(pairs.mean()), 4), round(low, 4), round(high, 4)


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give a row of the table for every method; seconds are those of the method that was done first."""
    by: dict[str, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        by.setdefault(run["method"], []).append(run)
    first = {
        run["seed"]: min(other["curve"][-1][1] for other in runs if other["seed"] == run["seed"])
        for run in runs
    }
    rows = []
    for name, found in by.items():
        difference = gap(found, by["uniform"]) if name != "uniform" and "uniform" in by else (0.0, 0.0, 0.0)
        rows.append(
            {
                "method": name,
                "mIoU": round(mean(run["curve"][-1][2] for run in found), 4),
                "against_uniform": difference,
                "mIoU_at_equal_seconds": round(
                    mean(at_seconds(run["curve"], first[run["seed"]]) for run in found), 4
                ),
                "reward": round(mean(run["reward"] for run in found), 4),
                "live_groups": round(mean(run["live_groups"] for run in found), 4),
                "steps": round(mean(run["steps"] for run in found), 1),
                "seconds": round(mean(run["curve"][-1][1] for run in found), 1),
            }
        )
    return rows


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw held-out mIoU over rollouts and over seconds, means of the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for name in dict.fromkeys(run["method"] for run in runs):
        curves = [run["curve"] for run in runs if run["method"] == name]
        count = min(map(len, curves))
        for axis, column in zip(axes, (0, 1), strict=True):
            across = [mean(curve[i][column] for curve in curves) for i in range(count)]
            axis.plot(across, [mean(curve[i][2] for curve in curves) for i in range(count)], label=name)
    axes[0].set(xlabel="rollouts", ylabel="held-out mIoU")
    axes[1].set(xlabel="processor seconds")
    axes[1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/samplers"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=3840)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--output", type=Path, default=RESULTS / "samplers.json")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        for name in options.only:
            path = options.runs / f"{name}-{seed}.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                done = train_one(name, options, seed)
                path.write_text(json.dumps(done))
            runs.append(json.loads(path.read_text()))
            print(name, seed, runs[-1]["curve"][-1], flush=True)
    rows = summarise(runs)
    setting = {"rollouts": options.rollouts, "prompts": options.prompts, "seeds": options.seeds}
    kept = [{key: value for key, value in run.items() if key != "answers"} for run in runs]
    options.output.write_text(json.dumps({**setting, "rows": rows, "runs": kept}, indent=1) + "\n")
    draw(runs, options.output.with_suffix(".svg"))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
