"""Demo of temporal grounding: build videos and a model, train it three ways, compare.

Run `python -m examples.video_grounding.demo --videos FOLDER`. Each step is an ordinary `mmrl` command with a
configuration of this folder; all results are written to `--output`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo_arguments import demo_parser
from mmrl.config.schema import BuildConfig, Config, load
from mmrl.core.reward_table import Measured

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

RUNS = ("cold_start", "tempsamp_r1", "grpo")
BUILT = ("videos", "model")
SHOWN = ("mIoU", "R1@0.3", "R1@0.5", "R1@0.7", "format", "completions/mean_length")


@dataclass(frozen=True)
class Trained:
    """Results of a run: its last evaluation, its journal, its model folder and its visualizations."""

    measured: Measured
    records: Sequence[Mapping[str, Any]]
    model: Path
    visualizations: Sequence[Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser("video_grounding", __doc__, "runs/demo", "all three runs")
    parser.add_argument(
        "--videos", required=True, help="folder of the sample videos; subfolders are searched"
    )
    options = parser.parse_args(arguments)
    demo(Path(options.videos), Path(options.output), options.seed, options.overrides)
    return 0


def demo(
    videos: Path,
    output: Path,
    seed: int = 0,
    overrides: Sequence[str] = (),
    video_overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Build, train and compare; write `summary.json` and `report.html`, and return the summary.

    `overrides` change the three runs, `video_overrides` the videos that are built.
    """
    began = time.perf_counter()
    for name in (*BUILT, *RUNS):
        shutil.rmtree(output / name, ignore_errors=True)
    changes = [*video_overrides, f"build.sources={videos}"]
    build("examples/video_grounding/videos.yaml", output / "videos", seed, changes)
    build("examples/video_grounding/model.yaml", output / "model", seed)
    start, trained = output / "model", {}
    for name in RUNS:
        changes = [*overrides, f"policy.model={start}"]
        for data, split in (("data", "train"), ("evaluation.data", "test")):
            changes += [f"{data}.path={output / 'videos' / split}.jsonl", f"{data}.root={output / 'videos'}"]
        trained[name] = train(make(f"examples/video_grounding/{name}.yaml", output / name, seed, changes))
        start = trained["cold_start"].model
    return report(output, seed, trained, time.perf_counter() - began)


def report(output: Path, seed: int, trained: Mapping[str, Trained], seconds: float) -> dict[str, Any]:
    """Print the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    measured = {name: run.measured for name, run in trained.items()}
    learning = {name: run.records for name, run in trained.items() if name != "cold_start"}
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


# ---- shared by the demos


def build(config: str, folder: Path, seed: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run the builder of a configuration into a folder; return its counts."""
    from mmrl.config.binding import Pieces
    from mmrl.core.rng import Stream

    wanted = load(config, [*overrides, f"output={folder}", f"seed={seed}"], BuildConfig)
    built = Pieces(Stream(seed)).make("builder", wanted.build).build(folder)
    print(f"{folder}: " + ", ".join(f"{key} {value}" for key, value in built.items()), flush=True)
    return built


def make(config: str, folder: Path, seed: int, overrides: Sequence[str]) -> Run:
    """Construct the run of a configuration, with its results in a folder."""
    from mmrl.build import build as make_run

    return make_run(load(config, [*overrides, f"seed={seed}", f"output_dir={folder}"], Config))


def train(run: Run) -> Trained:
    """Train, and return the results."""
    from mmrl.training.loop import train as go

    go(run)
    model = run.folder / f"checkpoint-{run.config.max_steps}" / "model"
    return Trained(run.final, run.journal.read(), model, run.report.pieces.visualizations)


def plain(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Convert evaluations to plain data for JSON."""
    return {
        name: {
            "metrics": dict(result.metrics),
            "intervals": {metric: list(ends) for metric, ends in result.intervals.items()},
        }
        for name, result in measured.items()
    }


def leave(output: Path, summary: Mapping[str, Any], title: str, sections: Sequence[str]) -> None:
    """Write `summary.json` and `report.html`, and print their paths."""
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
        for result in measured.values():
            low, high = result.intervals.get(name, (None, None))
            spread = "" if low is None else f" ({low:.{digits}f} to {high:.{digits}f})"
            value = result.metrics.get(name)
            whole = value is not None and value == int(value) and not spread
            shown = "" if value is None else f"{value:,.0f}" if whole else f"{value:.{digits}f}"
            cells.append(shown + spread)
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
