"""VADE, VAS and DUMP against uniform sampling where most prompts are far too hard or too easy.

    python -m benchmarks.claims.curricula [--seeds 0 1 2] [--quick]

docs/claims.md says what is claimed and compared. The rate and the steps of imitation were chosen with
uniform sampling at seed 100 (`RATE`, `LESSONS`). Writes results/claims_curricula.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims.common import Claim, leave, once, options, outcome, row, value
from benchmarks.claims.corners import CAPTIONS
from benchmarks.league import measured as scores_of
from benchmarks.samplers import Meter
from mmrl.build import build, held_out, load_evaluator, make_evaluator
from mmrl.cli import main as mmrl
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, EvaluateConfig, parse
from mmrl.data.dataset_io import write_rows
from mmrl.training.loop import train
from mmrl.training.trainer import Run

STEPS, PROMPTS, GROUP = 120, 16, 8
EACH, RIGHT = 80, 0.45  # prompts of a source; share of right answers in the lessons
LESSONS, RATE = 150, 1e-3
MEASURE, GRADIENT = "accuracy", "groups with a gradient"
BASE = "uniform"
FILES = {"VADE": "vade", "VAS (MMR1)": "mmr1_vas", "DUMP": "dump"}
GENERATE = {"name": "vision.generate", "max_completion_length": 5, "temperature": 1.0}
REPORT = {"trackers": [], "log_completions": False, "media_log_steps": 0, "startup_checks": [], "checks": []}
CLAIM = Claim(
    method="VADE, VAS, DUMP",
    baseline=BASE,
    claim="More groups with a gradient from as many rollouts, and more learned (arXiv 2511.18902, "
    "2509.21268, 2504.09710).",
    situation="400 training prompts: 20 % can be learned, 40 % are solved, 40 % cannot be solved.",
    measure=MEASURE,
)
ASKED = ("first", "last")
WORDS = (*CAPTIONS, "black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
TEXTS = [f"user {asked} of red blue? assistant {colour}" for asked in ASKED for colour in WORDS]
TEXTS += [f"user {word} {colour} assistant {colour}" for word in ("say", "repeat") for colour in WORDS]
TEXTS += ["user what is hidden? 7 assistant red", "user what comes next? 7 assistant red"]


def drawn_words(count: int, generator: torch.Generator) -> list[str]:
    """Draw different words."""
    return [WORDS[at] for at in torch.randperm(len(WORDS), generator=generator)[:count].tolist()]


def rows(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Ask for one of two words by its place: the prompts that can be learned.

    The column `shown` is what a careless teacher answers: the right word with the chance `RIGHT`, else the
    other.
    """
    generator, made = torch.Generator().manual_seed(seed), list[dict[str, Any]]()
    for number in range(count):
        words, at = drawn_words(2, generator), int(torch.randint(2, (), generator=generator))
        careless = float(torch.rand((), generator=generator)) > RIGHT
        asked, shown = f"{ASKED[at]} of {' '.join(words)}?", words[1 - at if careless else at]
        made.append(row_of(f"{split} {number}", asked, words[at], shown, "learnable"))
    return made


def row_of(name: str, asked: str, answer: str, shown: str, source: str) -> dict[str, Any]:
    """Make a row; `shown` is the answer of the lessons."""
    return {"id": name, "question": asked, "answer": answer, "shown": shown, "source": source}


def easy(source: str, word: str, count: int) -> list[dict[str, Any]]:
    """Ask for the word of the question itself."""
    words = [WORDS[at % len(WORDS)] for at in range(count)]
    return [row_of(f"{source} {at}", f"{word} {one}", one, one, source) for at, one in enumerate(words)]


def hard(source: str, asked: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Ask for four random words, which nobody can know; the teacher says one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [drawn_words(4, generator) for _ in range(count)]
    return [
        row_of(f"{source} {at}", f"{asked} {at}", " ".join(words), words[0], source)
        for at, words in enumerate(drawn)
    ]


def write_data(folder: Path, seed: int, each: int) -> None:
    """Write lessons for the start, training prompts of five sources, and held-out prompts."""
    mixed = [
        *easy("easy_a", "say", each), *easy("easy_b", "repeat", each),
        *hard("hard_a", "what is hidden?", each, 4 * seed),
        *hard("hard_b", "what comes next?", each, 4 * seed + 1),
    ]  # fmt: skip
    tested = rows("test", 200, 99)
    taken = {one["question"] for one in tested}
    fresh = [one for one in rows("train", 8 * each, 4 * seed + 2) if one["question"] not in taken]
    write_rows(folder / "held_out.jsonl", tested)
    write_rows(folder / "train.jsonl", [*fresh[:each], *mixed])
    write_rows(folder / "lessons.jsonl", [*fresh, *mixed])


def policy(model: Path) -> dict[str, Any]:
    """Name a model of which everything is trained."""
    return {"name": "vision.tokens", "model": str(model), "dtype": "float32", "freeze_vision_tower": False}


def start(folder: Path, seed: int, quick: bool, lessons: int) -> Path:
    """Build a model and let it imitate the lessons; return its folder."""
    steps = 2 if quick else lessons
    done = folder / f"lessons-{steps}" / f"checkpoint-{steps}" / "model"
    if done.exists():
        return done
    write_data(folder, seed, 8 if quick else EACH)
    sizes = {"side": 16, "patch": 4, "width": 64, "layers": 2, "vision_width": 64, "vision_layers": 2}
    built = {"build": {"name": "vision.tiny_llava", **sizes, "texts": TEXTS}, "output": str(folder / "model")}
    (folder / "model.yaml").write_text(json.dumps({**built, "seed": seed}))
    if mmrl(["build", str(folder / "model.yaml")]):
        raise SystemExit(1)
    shutil.rmtree(done.parents[1], ignore_errors=True)
    raw = {
        "policy": policy(folder / "model"),
        "data": {"name": "vision.visual_qa", "path": str(folder / "lessons.jsonl"), "demo": "{shown}"},
        "rewards": ["exact_match"],
        "rollout": {"num_prompts": 64},
        "learn": {"learning_rate": {"name": "linear", "start": 5e-3, "end": 3e-4, "steps": steps},
                  "optimizer": "muon", "micro_batch_steps": 65536},
        "report": REPORT, "max_steps": steps, "save_steps": steps, "seed": seed,
        "output_dir": str(done.parents[1]),
    }  # fmt: skip
    train(build(parse(merge(read("methods/grpo/supervised.yaml"), raw), Config), quiet=True))
    return done


def evaluation(folder: Path, quick: bool) -> dict[str, Any]:
    """Say how a model is measured: four sampled answers to every held-out prompt."""
    return {
        "data": {"name": "vision.visual_qa", "path": str(folder / "held_out.jsonl")},
        "engine": [{**GENERATE, "batch_size": 256}],
        "rewards": ["exact_match"],
        "num_prompts": 24 if quick else 200,
        "num_generations": 4,
    }  # fmt: skip


def measured(model: Path, folder: Path, seed: int, quick: bool, run: Run | None = None) -> dict[str, float]:
    """Measure the model of a folder, or that of a run."""
    wanted = parse(
        {"policy": policy(model), "evaluation": evaluation(folder, quick), "seed": seed}, EvaluateConfig
    )
    if run is None:
        return scores_of(load_evaluator(wanted))
    return scores_of(make_evaluator(wanted, held_out(wanted), run.policy, run.processes))


def train_one(name: str, given: argparse.Namespace, seed: int, rate: float, lessons: int) -> dict[str, Any]:
    """Train with a sampler from the start of a seed, with as many rollouts as the others, and measure it."""
    folder = given.runs / f"seed-{seed}"
    model = start(folder, seed, given.quick, lessons)
    steps = 2 if given.quick else STEPS
    output = folder / f"run-{FILES.get(name, name)}"
    shutil.rmtree(output, ignore_errors=True)
    raw = {
        "policy": policy(model),
        "data": {"name": "vision.visual_qa", "path": str(folder / "train.jsonl")},
        "rewards": ["exact_match"],
        "rollout": {"engine": [GENERATE], "num_prompts": PROMPTS, "num_generations": GROUP},
        "learn": {"learning_rate": rate, "optimizer": "adamw", "micro_batch_steps": 65536},
        "report": REPORT, "max_steps": steps, "save_steps": 1_000_000, "seed": seed,
        "output_dir": str(output),
    }  # fmt: skip
    if name in FILES:
        (sampler,) = read(f"methods/grpo/{FILES[name]}.yaml")["sampler"]
        raw["sampler"] = [{**sampler, **({"by": "source"} if name == "DUMP" else {})}]
    run = build(parse(merge(read("methods/grpo/grpo.yaml"), raw), Config), quiet=True)
    meter = run.pieces.made["meter"] = Meter(steps * PROMPTS * GROUP)
    train(run)
    found = measured(model, folder, seed, given.quick, run)
    share = meter.live / meter.groups
    shutil.rmtree(output)
    return {"seed": seed, "answers": {MEASURE: found}, "live": round(share, 4), "rollouts": meter.used}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the table."""
    given = options("curricula", __doc__, arguments)
    begun: list[float] = []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (BASE, *FILES)}
    for seed in given.seeds:
        folder = given.runs / f"seed-{seed}"
        model = start(folder, seed, given.quick, LESSONS)
        before = lambda m=model, f=folder, s=seed: {"answers": {MEASURE: measured(m, f, s, given.quick)}}
        begun.append(value(once(folder / "start.json", before), MEASURE))
        for name, done in runs.items():
            call = lambda n=name, s=seed: train_one(n, given, s, RATE, LESSONS)
            done.append(once(folder / f"{name}.json", call))
            last = done[-1]
            print(name, seed, round(value(last, MEASURE), 4), last["live"], last["seconds"], flush=True)
    rows_found = [row(name, done, runs[BASE], MEASURE) for name, done in runs.items()]
    for one, done in zip(rows_found, runs.values(), strict=True):
        one[GRADIENT] = [run["live"] for run in done]
    verdict = ", ".join(f"{one['name']} {outcome(one['gain'])}" for one in rows_found[1:])
    every = [run for done in runs.values() for run in done]
    leave(given, CLAIM, sum(begun) / len(begun), rows_found, verdict, every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
