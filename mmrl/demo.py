"""The embedded default: build clips and a model, train it three ways by the configurations `demo_*.yaml`,
compare.

`python -m mmrl.demo --clips FOLDER`; everything lands in `--output`, and each step is an ordinary `mmrl`
command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config import BuildConfig, Config, load
from mmrl.table import Measured

RUNS = ("cold_start", "tempsamp_r1", "grpo")
BUILT = ("clips", "model")
SHOWN = ("mIoU", "R1@0.3", "R1@0.5", "R1@0.7", "format", "completions/mean_length")


@dataclass(frozen=True)
class Trained:
    """What a run of the demo left: its last evaluation, its journal, its model folder, its exhibits."""

    measured: Measured
    records: Sequence[Mapping[str, Any]]
    model: Path
    exhibits: Sequence[Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="mmrl.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--clips", required=True, help="where the sample clips lie; subfolders are searched")
    parser.add_argument("--output", default="runs/demo", help="where everything lands (default: runs/demo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to all three runs")
    given = parser.parse_args(arguments)
    demo(Path(given.clips), Path(given.output), given.seed, given.overrides)
    return 0


def demo(
    clips: Path,
    output: Path,
    seed: int = 0,
    overrides: Sequence[str] = (),
    clip_overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Build, train, compare; leave `summary.json` and `report.html`, and give what the summary holds.

    `overrides` change the three runs, `clip_overrides` the clips that are built.
    """
    began = time.perf_counter()
    for name in (*BUILT, *RUNS):
        shutil.rmtree(output / name, ignore_errors=True)
    build("clips", output, seed, [*clip_overrides, f"build.sources={clips}"])
    build("model", output, seed)
    start, trained = output / "model", {}
    for name in RUNS:
        trained[name] = train(name, output, start, seed, overrides)
        start = trained["cold_start"].model
    return report(output, seed, trained, time.perf_counter() - began)


def build(name: str, output: Path, seed: int, overrides: Sequence[str] = ()) -> None:
    """Build what `demo_{name}.yaml` names."""
    from mmrl.bind import Pieces
    from mmrl.draws import Stream

    folder = output / name
    config = load(f"demo_{name}.yaml", [*overrides, f"output={folder}", f"seed={seed}"], BuildConfig)
    built = Pieces(Stream(seed)).make("builder", config.build).build(folder)
    print(f"{folder}: " + ", ".join(f"{key} {value}" for key, value in built.items()), flush=True)


def train(name: str, output: Path, start: Path, seed: int, overrides: Sequence[str]) -> Trained:
    """Train by `demo_{name}.yaml` from the weights in `start`."""
    from mmrl.build import build as make
    from mmrl.train import train as go

    here = [f"seed={seed}", f"output_dir={output / name}", f"policy.model={start}"]
    for data, split in (("data", "train"), ("evaluation.data", "test")):
        here += [f"{data}.path={output / 'clips' / split}.jsonl", f"{data}.root={output / 'clips'}"]
    run = make(load(f"demo_{name}.yaml", [*overrides, *here], Config))
    go(run)
    model = output / name / f"checkpoint-{run.max_steps}" / "model"
    return Trained(run.final, run.journal.read(), model, run.exhibits)


def report(output: Path, seed: int, trained: Mapping[str, Trained], seconds: float) -> dict[str, Any]:
    """Show the table, and write the summary and the page."""
    from mmrl.page import curves, document, metric_table

    measured = {name: one.measured for name, one in trained.items()}
    written = {
        name: {
            "metrics": dict(one.metrics),
            "intervals": {metric: list(ends) for metric, ends in one.intervals.items()},
        }
        for name, one in measured.items()
    }
    summary = {"seed": seed, "seconds": round(seconds, 1), **written}
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    learning = {name: one.records for name, one in trained.items() if name != "cold_start"}
    page = document(
        "mmrl demo",
        [
            "<h1>Finding events in video</h1>",
            f"<p class=note>A small Qwen2.5-VL, before and after reinforcement learning; seed {seed}.</p>",
            "<h2>Held out</h2>",
            metric_table(measured),
            *[exhibit(measured) for exhibit in trained["cold_start"].exhibits],
            "<h2>Reinforcement learning</h2><div class=grid>",
            *curves(learning),
            "</div><h2>Cold start</h2><div class=grid>",
            *curves({"cold_start": trained["cold_start"].records}),
            "</div>",
        ],
    )
    (output / "report.html").write_text(page)
    _show(measured, seconds)
    print(f"summary: {output / 'summary.json'}\nreport:  {(output / 'report.html').resolve()}", flush=True)
    return summary


def _show(measured: Mapping[str, Measured], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("held out", *measured, title=f"before and after, {seconds:.0f} s in all")
    for name in SHOWN:
        cells = []
        for one in measured.values():
            low, high = one.intervals.get(name, (None, None))
            spread = "" if low is None else f"  ({low:.3f} to {high:.3f})"
            cells.append(f"{one.metrics[name]:.3f}{spread}" if name in one.metrics else "")
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
