"""The embedded default: build clips and a model, train it three ways by the configurations `demo_*.yaml`,
compare.

`python -m examples.video_grounding.demo --clips FOLDER`; everything lands in `--output`, and each step is an
ordinary `mmrl` command.
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
from typing import TYPE_CHECKING, Any

from mmrl.config.schema import BuildConfig, Config, load
from mmrl.core.reward_table import Measured

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

RUNS = ("cold_start", "tempsamp_r1", "grpo")
BUILT = ("clips", "model")
SHOWN = ("mIoU", "R1@0.3", "R1@0.5", "R1@0.7", "format", "completions/mean_length")


@dataclass(frozen=True)
class Trained:
    """What a run of the demo left: its last evaluation, its journal, its model folder, its exhibits."""

    measured: Measured
    records: Sequence[Mapping[str, Any]]
    model: Path
    visualizations: Sequence[Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(
        prog="examples.video_grounding.demo", description=__doc__.splitlines()[0]
    )
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
    build(
        "examples/video_grounding/videos.yaml",
        output / "clips",
        seed,
        [*clip_overrides, f"build.sources={clips}"],
    )
    build("examples/video_grounding/model.yaml", output / "model", seed)
    start, trained = output / "model", {}
    for name in RUNS:
        here = [f"policy.model={start}"]
        for data, split in (("data", "train"), ("evaluation.data", "test")):
            here += [f"{data}.path={output / 'clips' / split}.jsonl", f"{data}.root={output / 'clips'}"]
        trained[name] = train(make(f"demo_{name}.yaml", output / name, seed, [*overrides, *here]))
        start = trained["cold_start"].model
    return report(output, seed, trained, time.perf_counter() - began)


def report(output: Path, seed: int, trained: Mapping[str, Trained], seconds: float) -> dict[str, Any]:
    """Show the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    measured = {name: one.measured for name, one in trained.items()}
    learning = {name: one.records for name, one in trained.items() if name != "cold_start"}
    sections = [
        "<h1>Finding events in video</h1>",
        f"<p class=note>A small Qwen2.5-VL, before and after reinforcement learning; seed {seed}.</p>",
        "<h2>Held out</h2>",
        metric_table(measured),
        *[visualization(measured) for visualization in trained["cold_start"].visualizations],
        "<h2>Reinforcement learning</h2><div class=grid>",
        *curves(learning),
        "</div><h2>Cold start</h2><div class=grid>",
        *curves({"cold_start": trained["cold_start"].records}),
        "</div>",
    ]
    summary = {"seed": seed, "seconds": round(seconds, 1), **plain(measured)}
    show(measured, SHOWN, f"before and after, {seconds:.0f} s in all")
    leave(output, summary, "mmrl demo", sections)
    return summary


# ---- what demos have in common


def build(config: str, folder: Path, seed: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Build what a configuration names into a folder, and tell what was built."""
    from mmrl.config.binding import Pieces
    from mmrl.core.rng import Stream

    wanted = load(config, [*overrides, f"output={folder}", f"seed={seed}"], BuildConfig)
    built = Pieces(Stream(seed)).make("builder", wanted.build).build(folder)
    print(f"{folder}: " + ", ".join(f"{key} {value}" for key, value in built.items()), flush=True)
    return built


def make(config: str, folder: Path, seed: int, overrides: Sequence[str]) -> Run:
    """Make the run of a configuration, with its results in a folder."""
    from mmrl.build import build as make_run

    return make_run(load(config, [*overrides, f"seed={seed}", f"output_dir={folder}"], Config))


def train(run: Run) -> Trained:
    """Train, and give what is left."""
    from mmrl.training.loop import train as go

    go(run)
    model = run.folder / f"checkpoint-{run.config.max_steps}" / "model"
    return Trained(run.final, run.journal.read(), model, run.report.pieces.visualizations)


def plain(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Turn evaluations into what JSON holds."""
    return {
        name: {
            "metrics": dict(one.metrics),
            "intervals": {metric: list(ends) for metric, ends in one.intervals.items()},
        }
        for name, one in measured.items()
    }


def leave(output: Path, summary: Mapping[str, Any], title: str, sections: Sequence[str]) -> None:
    """Write `summary.json` and `report.html`, and say where they are."""
    from mmrl.reporting.html import document

    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (output / "report.html").write_text(document(title, sections))
    print(f"summary: {output / 'summary.json'}\nreport:  {(output / 'report.html').resolve()}", flush=True)


def show(measured: Mapping[str, Measured], names: Sequence[str], title: str, digits: int = 3) -> None:
    """Print evaluations side by side, one line a metric, with intervals."""
    from rich.console import Console
    from rich.table import Table

    table = Table("held out", *measured, title=title)
    for name in names:
        cells = []
        for one in measured.values():
            low, high = one.intervals.get(name, (None, None))
            spread = "" if low is None else f" ({low:.{digits}f} to {high:.{digits}f})"
            value = one.metrics.get(name)
            whole = value is not None and value == int(value) and not spread
            shown = "" if value is None else f"{value:,.0f}" if whole else f"{value:.{digits}f}"
            cells.append(shown + spread)
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
