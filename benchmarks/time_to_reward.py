"""Seconds to a held-out reward: TRL's `GRPOTrainer` and `mmrl.Trainer` with the same arguments.

    python -m benchmarks.time_to_reward [--seeds 3] [--steps 120]

Both get the same model (the LLaVA of the league's easy-VQA task, which begins at about half right answers),
the same rows, the same reward function and the same arguments of `GRPOConfig`; each has the learning rate
that was best for it at a seed that is not in the table (`--tune` tries them). Held-out accuracy, of four
sampled answers to each of 400 questions, is measured by one evaluator on weights that were copied during
training; copies and evaluations are not counted. One thread; seconds are processor time of the process, from
the first step on, and both take turns. They are timed to the lowest of the last accuracies of all runs, which
every run reaches. Writes results/time_to_reward.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.league import measured
from benchmarks.league_tasks import easy_vqa
from benchmarks.machine import describe
from mmrl.build import load_evaluator
from mmrl.config.schema import EvaluateConfig, parse
from mmrl.data.dataset_io import Rows
from mmrl.vision.decoding.step_model import StepModel

RESULTS = Path(__file__).parent / "results" / "time_to_reward.json"
PROMPTS, GROUP, LONGEST = 32, 8, 4
RATES = {"trl": 3e-4, "mmrl": 3e-4}  # at seed TUNING: 0.573 and 0.568 after 1e-4, 0.629 and 0.624 after 3e-4
TUNED, TUNING = (1e-4, 3e-4), 100
EVERY = 10  # steps between two copies of the weights


def right(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Reward an answer that is the one of the row; what both trainers are given."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(text.strip().lower() == wanted) for text, wanted in zip(texts, answer, strict=True)]


class Copies(TrainerCallback):
    """Copies the weights every few steps, and notes the processor seconds until then without the copying."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, float, dict[str, torch.Tensor]]] = []
        self.seconds, self.since = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.since = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.seconds += time.process_time() - self.since
        if state.global_step % EVERY == 0:
            inner = model.model if isinstance(model, StepModel) else model  # ours is wrapped
            weights = {name: value.detach().clone() for name, value in inner.state_dict().items()}
            self.kept.append((state.global_step, self.seconds, weights))
        self.since = time.process_time()


def arguments(folder: Path, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Say what both trainers are told, in TRL's words."""
    return {
        "output_dir": str(folder), "learning_rate": rate, "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10, "seed": seed,
        "max_steps": steps, "per_device_train_batch_size": PROMPTS * GROUP, "num_generations": GROUP,
        "max_completion_length": LONGEST, "temperature": 1.0, "beta": 0.0, "loss_type": "grpo",
        "gradient_checkpointing": False, "max_grad_norm": 1.0, "bf16": False,
        "logging_steps": 1000, "save_steps": 1000, "report_to": "none",
    }  # fmt: skip


def rows_of(path: Path, count: int) -> list[dict[str, Any]]:
    """Read the questions with their images, as TRL wants them."""
    from PIL import Image

    found = []
    for row in islice(Rows(path, path.parent), count):
        with Image.open(path.parent / row.columns["image"]) as image:
            shown = image.convert("RGB")
        asked = [{"role": "user", "content": row.columns["question"]}]
        found.append({"prompt": asked, "image": shown, "answer": row.columns["answer"]})
    return found


def by_trl(model: Path, told: Mapping[str, Any], rows: list[dict[str, Any]], copies: Copies) -> None:
    """Train with TRL."""
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, use_safetensors=True),
        reward_funcs=right,
        args=GRPOConfig(**told, use_cpu=True, disable_tqdm=True),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(model),
        callbacks=[copies],
    ).train()


def by_mmrl(model: Path, told: Mapping[str, Any], rows: list[dict[str, Any]], copies: Copies) -> None:
    """Train with mmrl, its reports off as TRL's are."""
    import mmrl

    report = {
        "trackers": [],
        "log_completions": False,
        "media_log_steps": 0,
        "startup_checks": [],
        "checks": [],
    }
    policy = {"dtype": "float32", "freeze_vision_tower": False}
    mmrl.Trainer(
        model=str(model),
        reward_funcs=right,
        args={**told, "policy": policy, "report": report, "overwrite_output_dir": True},
        train_dataset=rows,
        callbacks=[copies],
        quiet=True,
    ).train()


TRAINERS: dict[str, Callable[..., None]] = {"trl": by_trl, "mmrl": by_mmrl}


class Judge:
    """Measures weights on held-out questions, always with the same draws.

    Args:
        shared: The task, with its policy and its evaluation.
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        wanted = {key: shared[key] for key in ("policy", "evaluation")}
        self.evaluator = load_evaluator(parse(wanted, EvaluateConfig))
        self.model: torch.nn.Module = self.evaluator.engine.policy.model  # type: ignore[union-attr]
        self.before = mean(measured(self.evaluator).values())

    def accuracy(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Measure the share of right answers."""
        self.model.load_state_dict(weights)
        return round(mean(measured(self.evaluator).values()), 4)


def run_one(name: str, task: Task, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Train with one of both, and measure the copies of its weights."""
    copies = Copies()
    told = arguments(task.home / "runs" / f"{name}-{rate}-{seed}", rate, steps, seed)
    torch.manual_seed(seed)
    TRAINERS[name](task.model, told, task.rows, copies)
    curve = [
        [step, round(seconds, 2), task.judge.accuracy(weights)] for step, seconds, weights in copies.kept
    ]
    print(f"{name} rate {rate} seed {seed}: {curve[-1]}", flush=True)
    return {"trainer": name, "rate": rate, "seed": seed, "curve": curve}


def seconds_to(curve: Sequence[Sequence[float]], reward: float) -> float | None:
    """Find when a curve first reaches a reward, by a line between two measurements; None: it does not.

    A curve is a list of (step, seconds, reward), the first of them before training.
    """
    for (_, early, low), (_, late, high) in zip(curve, curve[1:], strict=False):
        if low < reward <= high:
            return early + (late - early) * (reward - low) / (high - low)
    return None


def compared(runs: Sequence[Mapping[str, Any]], before: float) -> dict[str, Any]:
    """Time both to the lowest of the last rewards, seed by seed."""
    last = {name: mean(run["curve"][-1][2] for run in runs if run["trainer"] == name) for name in TRAINERS}
    goal = min(run["curve"][-1][2] for run in runs)
    taken: dict[str, list[float | None]] = {name: [] for name in TRAINERS}
    for run in runs:
        found = seconds_to([[0, 0.0, before], *run["curve"]], goal)
        taken[run["trainer"]].append(found and round(found, 1))
    per_step = {
        name: round(
            mean(run["curve"][-1][1] / run["curve"][-1][0] for run in runs if run["trainer"] == name), 3
        )
        for name in TRAINERS
    }
    return {"last": last, "goal": round(goal, 4), "seconds_to_goal": taken, "seconds_per_step": per_step}


@dataclass(frozen=True)
class Task:
    """What both trainers are given, and who measures them."""

    home: Path
    model: Path
    rows: list[dict[str, Any]]
    judge: Judge


def make_task(home: Path, source: str, quick: bool) -> Task:
    """Make the league's easy-VQA task."""
    home.mkdir(parents=True, exist_ok=True)
    shared = easy_vqa(home, source, quick)
    rows = rows_of(Path(shared["data"]["path"]), 200 if quick else shared["data"]["limit"])
    return Task(home, Path(shared["policy"]["model"]), rows, Judge(shared))


def main(given: Sequence[str] | None = None) -> int:
    """Train with both, or try rates, and write the table."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of a run")
    parser.add_argument("--tune", action="store_true", help=f"try the rates {TUNED} instead, one seed")
    parser.add_argument("--source", default="", help="where easy-VQA's images are, if it is not installed")
    parser.add_argument("--output", type=Path, default=Path("runs/time_to_reward"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="few steps of one seed; writes no results here")
    options = parser.parse_args(given)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if options.quick:
        options.seeds, options.steps, options.results = 1, EVERY, options.output / "results.json"
    task = make_task(options.output, options.source, options.quick)
    if options.tune:
        for rate in TUNED:
            for name in TRAINERS:
                run_one(name, task, rate, options.steps, TUNING)
        return 0
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for name in TRAINERS:
            runs.append(run_one(name, task, RATES[name], options.steps, seed))
    before = round(task.judge.before, 4)
    found = {"before": before, **compared(runs, before), "runs": runs, "machine": describe()}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "runs"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
