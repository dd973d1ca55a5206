"""URPA: from the labelled videos of one source to those of another without labels.

    python -m benchmarks.urpa --demo runs/demo [--seeds 0 1 2] [--steps 60]

`--demo` is a folder that `make demo` left. Its questions are parted by what they ask for: street scenes are
the source, everything else the target. From the imitation that the demo starts with (it has seen both, as a
pretrained model has), GRPO with labels on the source; from there URPA on the target without labels, and GRPO
on the target with labels as the ceiling. All are measured on held-out questions of the target. Runs that are
finished are read, one that was cut short goes on. Writes results/urpa.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.samplers import gap

RESULTS = Path(__file__).parent / "results"
STREET = (
    "a bicycle leans against a wall",
    "a bus waits at the corner of a street",
    "cars and a taxi stand close together",
    "cars pass behind a railing",
    "the roof of a bus is seen from above",
)
# A run: its method, the questions it trains on, whether it sees labels, and the run that it begins from.
RUNS: dict[str, tuple[str, str, bool, str]] = {
    "source": ("urpa_source", "source", True, ""),
    "adapted": ("urpa", "target", False, "source"),
    "ceiling": ("urpa_source", "target", True, "source"),
}


def parted(options: argparse.Namespace, split: str, part: str) -> Path:
    """Write the questions of one source, and return their file."""
    lines = (options.demo / "videos" / f"{split}.jsonl").read_text().splitlines()
    kept = [line for line in lines if (json.loads(line)["query"] in STREET) == (part == "source")]
    path = options.runs / f"{split}-{part}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(kept) + "\n")
    return path


def last_model(folder: Path) -> Path:
    """Find the model of the last checkpoint of a run."""
    return max(folder.glob("checkpoint-*/model"), key=lambda path: int(path.parent.name.partition("-")[2]))


def train_one(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a run; return the answers to the held-out questions of the target before and after it."""
    from mmrl.build import build
    from mmrl.config.loading import merge, read
    from mmrl.config.schema import Config, parse
    from mmrl.training.loop import train

    method, part, labelled, begins = RUNS[name]
    folder, root = options.runs / f"{name}-{seed}", str(options.demo / "videos")
    start = last_model(options.runs / f"{begins}-{seed}" if begins else options.demo / "cold_start")
    raw = merge(read("examples/video_grounding/grpo.yaml"), read(f"configs/methods/grounding/{method}.yaml"))
    changes = {
        "policy": {"model": str(start)},
        "data": {"path": str(parted(options, "train", part)), "root": root, "unlabelled": not labelled},
        "evaluation": {
            "data": {"path": str(parted(options, "test", "target")), "root": root},
            "rewards": ["vision.temporal_iou", "tag_format"],
        },
        "rollout": {"num_prompts": 16, "num_generations": 8},
        "learn": {"learning_rate": {"start": options.learning_rate, "steps": options.steps}},
        "report": {"log_completions": False},
        "eval_steps": 0, "eval_on_start": True, "save_steps": max(1, options.steps // 4),
        "max_steps": options.steps, "seed": seed, "output_dir": str(folder),
    }  # fmt: skip
    run = build(parse(merge(raw, changes), Config), quiet=True)
    train(run)
    table = run.final.table
    answers = dict(zip(table.uids, table.at_end("temporal_iou").tolist(), strict=True))
    records = run.journal.read()
    confidence = [r["rewards/span_confidence/mean"] for r in records if "rewards/span_confidence/mean" in r]
    return {
        "run": name, "seed": seed, "before": round(records[0]["eval_mIoU"], 4),
        "mIoU": round(run.final.metrics["mIoU"], 4), "answers": answers,
        "confidence": [round(x, 4) for x in (confidence[:1] + confidence[-1:])],
    }  # fmt: skip


def summarise(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give a row for the model before, after URPA and with labels; differences are to before."""
    by = {name: [run for run in runs if run["run"] == name] for name in RUNS}
    return [
        {
            "run": {"source": "before: source with labels", "adapted": "URPA, no labels"}.get(
                name, "with labels"
            ),
            "mIoU_of_target": round(mean(run["mIoU"] for run in found), 4),
            "against_before": gap(found, by["source"]) if name != "source" else (0.0, 0.0, 0.0),
        }
        for name, found in by.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/urpa"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=RESULTS / "urpa.json")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        for name in RUNS:
            path = options.runs / f"{name}-{seed}.json"
            if not path.exists():
                done = train_one(name, seed, options)
                path.write_text(json.dumps(done))
            runs.append(json.loads(path.read_text()))
            print(name, seed, runs[-1]["before"], runs[-1]["mIoU"], runs[-1]["confidence"], flush=True)
    kept = [{key: value for key, value in run.items() if key != "answers"} for run in runs]
    rows = summarise(runs)
    setting = {"steps": options.steps, "seeds": options.seeds, "learning_rate": options.learning_rate}
    options.output.write_text(json.dumps({**setting, "rows": rows, "runs": kept}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
