"""Demo of self-play: a small VLM plays "who is the spy" against itself (Vision-Zero).

A small LLaVA learns questions about colours and the words of the game by imitation, from a part of the
images of easy-VQA and from players that make mistakes. Then it plays against itself about pairs of the other
images, without any label. It is measured against its frozen start, in both roles, on held-out pairs, and on
held-out questions that no game asks.

Run `python -m examples.visual_game.demo`. Each step is an ordinary `mmrl` command with a configuration of
this folder; all results are written to `--output`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.demo_arguments import demo_parser
from examples.preference_pairs.demo import mean_with_interval
from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from examples.worker_pool import workers
from mmrl.build import load_evaluator
from mmrl.config.schema import EvaluateConfig, load
from mmrl.core.episodes import join_episodes
from mmrl.core.reward_table import Measured, RewardTable

HERE = "examples/visual_game"
BUILT = ("data", "model", "imitation", "self_play")
NAMES = ("start", "self-play")
SHOWN = ("win rate", "civilians won", "spy won", "accuracy")
SIDES = {"civilians": "[spy]", "spy": "[civilian,voter]"}  # who learned, and who is frozen then
Table = dict[str, Tensor]  # one number per held-out pair or question


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser("visual_game", __doc__, "runs/demo-game", "the self-play", seeds=3)
    parser.add_argument("--resume", action="store_true", help="go on where a killed run stopped")
    options = parser.parse_args(arguments)
    demo(
        Path(options.output),
        options.seed,
        options.seeds,
        options.overrides,
        jobs=options.jobs,
        resume=options.resume,
    )
    return 0


def demo(
    output: Path,
    seed: int = 0,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Sequence[str]] | None = None,
    jobs: int = 1,
    resume: bool = False,
) -> dict[str, Any]:
    """Run every seed, compare, write `summary.json` and `report.html`, and return the summary.

    `overrides` change the self-play, `changes` the other steps by name; `jobs` seeds run at the same time.
    With `resume`, finished seeds are read from their `found.json`, and others go on from their checkpoints.
    """
    began, numbers = time.perf_counter(), range(seed, seed + seeds)
    asked = [(output / f"seed-{number}", number, overrides, changes or {}, resume) for number in numbers]
    with workers(min(jobs, seeds)) as pool:
        found = list(pool.map(one_seed, *zip(*asked, strict=True)))
    return report(output, dict(zip(numbers, found, strict=True)), time.perf_counter() - began)


@dataclass(frozen=True)
class Found:
    """What one seed found."""

    measured: Table
    records: Sequence[Mapping[str, Any]]  # what the self-play logged, by step
    seconds: float  # processor time


def one_seed(
    folder: Path, seed: int, overrides: Sequence[str], changes: Mapping[str, Sequence[str]], resume: bool
) -> Found:
    """Build, imitate, play and measure; write what was found to `found.json`."""
    began, place = time.process_time(), folder / "found.json"
    if resume and place.exists():
        kept = json.loads(place.read_text())
        tensors = {name: torch.tensor(values) for name, values in kept["measured"].items()}
        return Found(tensors, kept["records"], kept["seconds"])
    if not resume:
        for name in BUILT:
            shutil.rmtree(folder / name, ignore_errors=True)
        place.unlink(missing_ok=True)
    for name in ("data", "model"):  # the same files from the same seed
        file = "build" if name == "data" else name
        build(f"{HERE}/{file}.yaml", folder / name, seed, changes.get(name, ()))
    questions = [f"evaluation.data.{key}" for key in ("path", "root")]
    asked = [f"{questions[0]}={folder / 'data/test.jsonl'}", f"{questions[1]}={folder / 'data'}"]
    asked += changes.get("evaluate", ())

    def trained(name: str, rows: str, start: Path, more: Sequence[str]) -> Trained:
        here = [f"data.path={folder / 'data' / rows}", f"data.root={folder / 'data'}"]
        options = [*here, f"policy.model={start}", *asked, *more]
        return train(make(f"{HERE}/{name}.yaml", folder / name, seed, options))

    start = trained("imitation", "lessons.jsonl", folder / "model", changes.get("imitation", ()))
    played = trained("self_play", "train_pairs.jsonl", start.model, overrides)
    found: Table = {}
    for name, run in (("start", start), ("self-play", played)):
        found[f"{name}: accuracy"] = run.measured.table.at_end("exact_match")
        for side, frozen in SIDES.items():
            if name == "start" and side == "spy":  # both sides are the start's, in the same games
                caught = found["start: civilians won"]
            else:
                caught = games(folder, run.model, start.model, frozen, seed, changes.get("play", ()))
            found[f"{name}: {side} won"] = caught if side == "civilians" else 1 - caught
    seconds = round(time.process_time() - began, 1)
    measured = {name: values.tolist() for name, values in found.items()}
    place.write_text(json.dumps({"measured": measured, "records": played.records, "seconds": seconds}) + "\n")
    return Found(found, played.records, seconds)


def games(folder: Path, model: Path, start: Path, frozen: str, seed: int, more: Sequence[str]) -> Tensor:
    """Play about every held-out pair against the frozen start; return whether the spy was caught."""
    where = [
        f"evaluation.data.path={folder / 'data/test_pairs.jsonl'}",
        f"evaluation.data.root={folder / 'data'}",
    ]
    here = [
        f"policy.model={model}", f"evaluation.engine[1].policy.model={start}",
        f"evaluation.engine[1].frozen={frozen}", f"output_dir={folder / 'games'}", f"seed={seed}",
    ]  # fmt: skip
    config = load(f"{HERE}/play.yaml", [*where, *here, *more], EvaluateConfig)
    return join_episodes(load_evaluator(config).measure(intervals=False).table).at_end("spy_caught")


# ---- report


def compared(results: Mapping[int, Table]) -> dict[str, Measured]:
    """Compare self-play with its start, both means over seeds; they met the same pairs and questions.

    Intervals are over pairs and questions, those of differences paired.
    """
    shown = {name: Measured({}, {}, (), RewardTable.empty()) for name in (*NAMES, "difference")}
    for what in SHOWN:
        before, after = (
            torch.stack([found_of(found, name, what) for found in results.values()]).mean(0) for name in NAMES
        )
        for name, values in zip(shown, (before, after, after - before), strict=True):
            shown[name].metrics[what], shown[name].intervals[what] = mean_with_interval(values)
    return shown


def found_of(found: Table, name: str, what: str) -> Tensor:
    """Return what one seed measured; the win rate is the mean over both sides."""
    if what == "win rate":
        return torch.stack([found[f"{name}: {side} won"] for side in SIDES]).mean(0)
    return found[f"{name}: {what}"]


def report(output: Path, found: Mapping[int, Found], seconds: float) -> dict[str, Any]:
    """Print the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    results = {seed: one.measured for seed, one in found.items()}
    measured = compared(results)
    by_seed = {
        what: [
            round(float((found_of(one, "self-play", what) - found_of(one, "start", what)).mean()), 4)
            for one in results.values()
        ]
        for what in SHOWN
    }
    note = (
        "A small LLaVA learned questions about colours and the words of the game by imitation, then played "
        "against itself about other images, without labels. The win rate is against the frozen start on "
        "held-out pairs, the mean over both sides; no game asks the held-out questions. "
        f"Seeds {', '.join(map(str, results))}."
    )
    sections = [
        "<h1>Who is the spy</h1>",
        f"<p class=note>{note}</p>",
        "<h2>Held out</h2>",
        metric_table(measured),
        "<h2>Self-play</h2><div class=grid>",
        *curves({f"seed {seed}": one.records for seed, one in found.items()}),
        "</div>",
    ]
    summary = {
        "seeds": list(results),
        "seconds": round(seconds, 1),
        "processor seconds by seed": [one.seconds for one in found.values()],
        "difference by seed": by_seed,
        **plain(measured),
    }
    show(measured, SHOWN, f"before and after, {seconds:.0f} s in all")
    output.mkdir(parents=True, exist_ok=True)
    leave(output, summary, "mmrl game demo", sections)
    return summary


if __name__ == "__main__":
    sys.exit(main())
