"""Vision-Zero's transfer where the game needs what held-out questions need, and the start sees badly.

    python -m benchmarks.claims.vision_zero [--seeds 0 1 2] [--quick]

docs/claims.md says what is claimed and compared. The steps of imitation were chosen at seed 100
(`LESSONS`). `--pilot` compares rates there, by how many spies of the frozen start are caught.
Writes results/claims_vision_zero.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims.cells import drawn_colours, save_cells
from benchmarks.claims.common import PILOT, Claim, leave, once, options, outcome, row, value
from examples.video_grounding.demo import Trained, build, make, train
from examples.visual_game.demo import HERE, games
from mmrl.build import load_evaluator
from mmrl.config.schema import EvaluateConfig, load
from mmrl.core.reward_table import Measured
from mmrl.data.dataset_io import Rows, write_rows

STEPS, GAMES, CIVILIANS = 40, 24, 4
RATES = (1e-5, 3e-5, 1e-4)
LESSONS, RATE, NOISE = 40, 1e-4, 70.0  # the rate is chosen by `--pilot`
IMAGES, LABELLED = {"train": 1400, "test": 200}, 400  # two questions about every image
GAME = "examples.visual_game.spy_lessons:ShortSpy"
MEASURE, CAUGHT = "accuracy", "spy caught"
START, PLAYED, CONTROL = "start, no games", "self-play", "GRPO on unrelated prompts"
CLAIM = Claim(
    method="Vision-Zero",
    baseline=START,
    claim="Self-play without labels improves a model at questions that no game asks (arXiv 2509.25541).",
    situation="Votes and held-out questions need the colour of the own image; the start reads it badly.",
    measure=MEASURE,
)


def write_source(folder: Path, seed: int, counts: Mapping[str, int]) -> None:
    """Write images of one coloured cell in the layout of easy-VQA, with two questions about each."""
    generator = torch.Generator().manual_seed(seed)
    for split, count in counts.items():
        asked: list[tuple[str, str, int]] = []
        for number in range(count):
            colour, other = drawn_colours(2, generator)
            save_cells(folder / split / "images" / f"{number}.png", [colour], NOISE, generator)
            asked.append(("what is the color of the rectangle?", colour, number))
            named = colour if number % 2 else other
            asked.append((f"is there a {named} shape?", "yes" if named == colour else "no", number))
        (folder / split / "questions.json").write_text(json.dumps(asked))


def unrelated(count: int, seed: int) -> list[dict[str, Any]]:
    """Ask for the last of three words, without an image."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [drawn_colours(3, generator) for _ in range(count)]
    return [
        {"id": f"last {at}", "question": f"last of {' '.join(words)}?", "answer": words[-1]}
        for at, words in enumerate(drawn)
    ]


def trained(folder: Path, file: str, output: Path, model: Path, seed: int, more: Sequence[str]) -> Trained:
    """Train by a file of the example, or of this folder, and measure the held-out questions."""
    data = folder / "data"
    where = [f"policy.model={model}", f"data.root={data}", f"evaluation.data.root={data}",
             f"evaluation.data.path={data / 'test.jsonl'}", "report.checks=[]"]  # fmt: skip
    return train(make(file, output, seed, [*where, *more]))


def start(folder: Path, seed: int, quick: bool, lessons: int) -> Path:
    """Write data and a model, and let it imitate questions and games; return its folder."""
    steps = 2 if quick else lessons
    output, data = folder / f"imitation-{steps}", folder / "data"
    if (done := output / f"checkpoint-{steps}" / "model").exists():
        return done
    write_source(folder / "source", seed, {"train": 60, "test": 12} if quick else IMAGES)
    labelled, played = (24, 20) if quick else (LABELLED, 400)
    changes = [f"build.source={folder / 'source'}", f"build.labelled={labelled}", "build.guess=0.3",
               f"build.civilians={CIVILIANS}", f"build.games={played}"]  # fmt: skip
    build(f"{HERE}/build.yaml", data, seed, changes)
    words = unrelated(2 * labelled, seed)
    lessons_of = [dict(one.columns) for one in Rows(data / "lessons.jsonl", data)]
    write_rows(data / "all_lessons.jsonl", [*lessons_of, *words[:labelled]])
    write_rows(data / "unrelated.jsonl", words[labelled:])
    build(f"{HERE}/model.yaml", folder / "model", seed)
    shutil.rmtree(output, ignore_errors=True)
    more = [
        f"data.path={data / 'all_lessons.jsonl'}",
        f"max_steps={steps}",
        f"learn.learning_rate.steps={steps}",
    ]
    trained(folder, f"{HERE}/imitation.yaml", output, folder / "model", seed, more)
    return done


def train_one(name: str, folder: Path, model: Path, seed: int, quick: bool, rate: float) -> dict[str, Any]:
    """Train a row of the table; return the answers, and after games also whether spies are caught."""
    output = folder / name.partition(" ")[0]
    shutil.rmtree(output, ignore_errors=True)
    steps, limit = (2, 4) if quick else (STEPS, 200)
    rising = f"{{name: linear, start: {rate / 5}, end: {rate}, steps: 5}}"
    more = [f"learn.learning_rate={rising}", f"max_steps={steps}", "policy.freeze_vision_tower=false"]
    game = f"{{name: '{GAME}', civilians: {CIVILIANS}}}"
    more.append(f"rollout.num_prompts={4 if quick else GAMES}")
    if name == PLAYED:
        more += [f"data.path={folder / 'data/train_pairs.jsonl'}", f"rollout.engine[1].game={game}"]
        run = trained(folder, f"{HERE}/self_play.yaml", output, model, seed, more)
    else:
        more += [
            f"data.path={folder / 'data/unrelated.jsonl'}",
            f"rollout.num_prompts={4 if quick else GAMES}",
        ]
        run = trained(folder, "benchmarks/claims/unrelated.yaml", output, model, seed, more)
    found = {MEASURE: answers(run.measured)}
    if name == PLAYED:
        where = [f"evaluation.engine[1].game={game}", f"evaluation.data.limit={limit}"]
        for key, side in (("self-play", run.model), ("start", model)):
            caught = games(folder, side, model, "[spy]", seed, where).tolist()
            found[f"{CAUGHT}, {key}"] = {str(at): value for at, value in enumerate(caught)}
    shutil.rmtree(output)
    return {"seed": seed, "answers": found}


def answers(measured: Measured) -> dict[str, float]:
    """Return whether every held-out question was answered right."""
    table = measured.table
    return dict(zip(table.uids, table.at_end("exact_match").tolist(), strict=True))


def before(model: Path, folder: Path) -> dict[str, Any]:
    """Measure the start on the held-out questions."""
    data = folder / "data"
    where = [
        f"policy.model={model}",
        f"evaluation.data.root={data}",
        f"evaluation.data.path={data}/test.jsonl",
    ]
    table = (
        load_evaluator(load(f"{HERE}/evaluate.yaml", where, EvaluateConfig)).measure(intervals=False).table
    )
    return {"answers": {MEASURE: dict(zip(table.uids, table.at_end("exact_match").tolist(), strict=True))}}


def pilot(given: argparse.Namespace) -> dict[str, list[float]]:
    """Play at every rate at the pilot's seed; return how often spies of the frozen start are caught.

    The numbers are by the start and after self-play, in games about held-out pairs; no question is read.
    """
    folder, found = given.runs / f"seed-{PILOT}", dict[str, list[float]]()
    model = start(folder, PILOT, given.quick, LESSONS)
    for rate in RATES:
        call = partial(train_one, PLAYED, folder, model, PILOT, given.quick, rate)
        run = once(folder / f"{PLAYED}-{rate:g}.json", call)
        found[f"{rate:g}"] = [round(value(run, f"{CAUGHT}, {key}"), 4) for key in ("start", "self-play")]
        print(rate, found[f"{rate:g}"], run["seconds"], flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the table."""
    given = options("vision_zero", __doc__, arguments, pilot=True)
    if given.pilot:
        print(pilot(given))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (START, PLAYED, CONTROL)}
    for seed in given.seeds:
        folder = given.runs / f"seed-{seed}"
        model = start(folder, seed, given.quick, LESSONS)
        for name, done in runs.items():
            call = lambda name=name, seed=seed, folder=folder, model=model: (
                before(model, folder)
                if name == START
                else train_one(name, folder, model, seed, given.quick, RATE)
            )
            done.append(once(folder / f"{name}.json", call))
            print(name, seed, round(value(done[-1], MEASURE), 4), done[-1]["seconds"], flush=True)
    rows = [row(name, done, runs[START], MEASURE) for name, done in runs.items()]
    caught = [[value(run, f"{CAUGHT}, {key}") for run in runs[PLAYED]] for key in ("start", "self-play")]
    rows[1][CAUGHT] = {"start": caught[0], "self-play": caught[1]}
    less = row("", runs[PLAYED], runs[CONTROL], MEASURE)["gain"]
    found = outcome(rows[1]["gain"])
    if found == "appears" != outcome(less):
        found = "does not appear"
    verdict = f"{found}: self-play less the control is {less[0]:+.3f} ({less[1]:+.3f} to {less[2]:+.3f})"
    done = [run for some in runs.values() for run in some]
    leave(given, CLAIM, rows[0]["mean"], rows, verdict, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
